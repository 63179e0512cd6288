"""deploy/kubernetes: the manifests, and a preemption of their pods."""

from __future__ import annotations

import json
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from dmiddleware.launch.cli import ditask
from dmiddleware.launch.options import LaunchOptions
from dmiddleware.launch.platforms import place
from tests.deploy import container, counting_program
from tests.waiting import DEADLINE_S, read, wait_until

ROOT = Path(__file__).resolve().parents[2]
BASE = ROOT / "deploy" / "kubernetes"
KUSTOMIZATION = yaml.safe_load((BASE / "kustomization.yaml").read_text())
MANIFESTS = {name: yaml.safe_load((BASE / name).read_text()) for name in KUSTOMIZATION["resources"]}
BY_KIND = {one["kind"]: one for one in MANIFESTS.values()}
JOB = BY_KIND["Job"]
POD = JOB["spec"]["template"]["spec"]
(TRAIN,) = POD["containers"]
N_PODS = JOB["spec"]["completions"]
# The first version in which everything that the Job uses is stable, and the newest schemas.
VERSIONS = ("1.33", kubernetes_validate.latest_version())


class ReadNames(dict[str, str]):
    """Variables that note which of them are read."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.names: set[str] = set()

    def __contains__(self, name: object) -> bool:
        self.names.add(str(name))
        return super().__contains__(name)

    def __getitem__(self, name: str) -> str:
        self.names.add(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self.names.add(name)
        return super().get(name, default)


def variables(index: int) -> dict[str, str]:
    """Return the variables of a pod: those of the manifest, and what Kubernetes adds."""
    fields = {
        "metadata.name": f"train-{index}-x7k9q",
        "status.podIP": f"127.0.0.{2 + index}",
    }
    secrets = {("train", "key"): "0123456789abcdef" * 4}
    found = {"HOSTNAME": f"train-{index}", "JOB_COMPLETION_INDEX": str(index)}
    for one in TRAIN["env"]:
        source = one.get("valueFrom", {})
        if "fieldRef" in source:
            found[one["name"]] = fields[source["fieldRef"]["fieldPath"]]
        elif "secretKeyRef" in source:
            secret = source["secretKeyRef"]
            found[one["name"]] = secrets[secret["name"], secret["key"]]
        else:
            found[one["name"]] = one["value"]
    return found


def options() -> LaunchOptions:
    """Return the options of the manifest, as ditask reads them."""
    with ditask.make_context("ditask", list(TRAIN["args"])) as context:
        texts = {name: value for name, value in context.params.items() if value is not None}
    texts.pop("arguments", None)
    return LaunchOptions.from_texts(texts)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", sorted(MANIFESTS))
def test_manifests_are_valid(name: str, version: str) -> None:
    kubernetes_validate.validate(MANIFESTS[name], version, strict=True)


def test_the_kustomization_has_all_manifests_and_replaces_the_image() -> None:
    assert (KUSTOMIZATION["kind"], KUSTOMIZATION["apiVersion"].split("/")[0]) == (
        "Kustomization",
        "kustomize.config.k8s.io",
    )
    files = {path.name for path in BASE.iterdir()}
    assert files == {"kustomization.yaml", *MANIFESTS}
    assert [image["name"] for image in KUSTOMIZATION["images"]] == [TRAIN["image"]]


def test_each_pod_finds_its_place_and_the_service_names_all_of_them() -> None:
    service, name = BY_KIND["Service"], JOB["metadata"]["name"]
    for index in range(N_PODS):
        env = ReadNames(variables(index))
        placement = place("k8s", env, port=options().hub_port)
        assert (placement.index, placement.count) == (index, N_PODS)
        assert placement.bind == f"127.0.0.{2 + index}"
        assert placement.hosts == tuple(
            f"{name}-{number}.{service['metadata']['name']}" for number in range(N_PODS)
        )
        assert env.names <= env.keys()
        assert placement.port == TRAIN["ports"][0]["containerPort"]
    assert POD["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"] is True
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": name}
    assert JOB["spec"]["completionMode"] == "Indexed"


def test_the_number_of_pods_is_the_same_everywhere() -> None:
    roles = options().platform_spec.roles
    assert roles is not None
    assert len(roles) == JOB["spec"]["parallelism"] == N_PODS
    learners = [index for index, text in enumerate(roles) if "learner" in text]
    (rule,) = JOB["spec"]["successPolicy"]["rules"]
    assert rule["succeededIndexes"] == ",".join(map(str, learners))


def test_a_pod_has_more_time_to_end_than_its_processes() -> None:
    assert options().kill_after + 10 <= POD["terminationGracePeriodSeconds"]


def test_what_a_run_writes_to_is_a_volume_and_the_rest_is_read_only() -> None:
    security = TRAIN["securityContext"]
    assert security["readOnlyRootFilesystem"] is True
    assert security["allowPrivilegeEscalation"] is False
    assert POD["securityContext"]["runAsNonRoot"] is True
    assert POD["securityContext"]["runAsUser"] == container.UID
    mounts = {one["mountPath"]: one["name"] for one in TRAIN["volumeMounts"]}
    volumes = {one.pop("name"): one for one in [dict(volume) for volume in POD["volumes"]]}
    claim = BY_KIND["PersistentVolumeClaim"]
    assert volumes[mounts["/work"]] == {
        "persistentVolumeClaim": {"claimName": claim["metadata"]["name"]}
    }
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    assert "emptyDir" in volumes[mounts["/tmp"]]
    assert volumes[mounts["/dev/shm"]]["emptyDir"]["medium"] == "Memory"


class Pods:
    """The pods of the Job, in containers of this machine.

    Args:
        folder: the volume, and the files of the pods.
    """

    def __init__(self, folder: Path) -> None:
        self.volume = folder / "work"
        self.volume.mkdir()
        shutil.copy(counting_program.__file__, self.volume / "program.py")
        self._hosts = folder / "hosts"
        names = [f"127.0.0.{2 + index} train-{index}.train\n" for index in range(N_PODS)]
        self._hosts.write_text("127.0.0.1 localhost\n" + "".join(names))
        self._outputs = [folder / f"pod-{index}" for index in range(N_PODS)]
        with socket.create_server(("127.0.0.2", 0)) as server:
            self._port = server.getsockname()[1]
        self._exit = ExitStack()

    def __enter__(self) -> Pods:
        return self

    def __exit__(self, *_: object) -> None:
        self._exit.close()

    def start(self, index: int) -> subprocess.Popen[bytes]:
        """Start a pod with the command and the variables of the manifest."""
        arguments = list(TRAIN["args"])
        arguments[arguments.index("--main") + 1] = "program.main"
        spec = json.loads(arguments[arguments.index("--platform-spec") + 1])
        arguments[arguments.index("--platform-spec") + 1] = json.dumps(spec | {"port": self._port})
        env = variables(index) | {"TMPDIR": "/tmp", "HOME": "/tmp"}
        pod = container.start(
            self.volume,
            ["ditask", *arguments],
            env,
            hosts=self._hosts,
            output=self._outputs[index],
        )
        self._exit.enter_context(pod)
        self._exit.callback(pod.kill)
        return pod

    def text(self, index: int = 0) -> str:
        """Return what a pod has printed."""
        return read(self._outputs[index])

    def wait_for(self, text: str) -> None:
        """Wait until the learner's pod has printed something."""
        wait_until(lambda: text in self.text(), lambda: f"{text!r} in\n{self.text()}")

    def snapshots(self) -> set[Path]:
        return set(self.volume.glob("runs/sum/snapshots/step_*.safetensors"))


@pytest.fixture
def pods(tmp_path: Path) -> Iterator[Pods]:
    container.skip_without_containers(tmp_path)
    with Pods(tmp_path) as pods:
        yield pods


@pytest.mark.process
@pytest.mark.timeout(240)
def test_a_job_whose_pods_are_all_preempted_continues_exactly(pods: Pods) -> None:
    (pods.volume / "hold").touch()
    running = [pods.start(index) for index in range(N_PODS)]
    pods.wait_for("step 20\n")
    assert not pods.snapshots()
    for pod in running:
        container.process_one(pod).send_signal(signal.SIGTERM)
    assert [pod.wait(DEADLINE_S) for pod in running] == [143] * N_PODS, pods.text()
    assert pods.snapshots()

    running = [pods.start(index) for index in range(N_PODS)]
    assert [pod.wait(DEADLINE_S) for pod in running] == [0] * N_PODS, pods.text()
    assert counting_program.result(2) in pods.text()


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.timeout(240)
@pytest.mark.parametrize("index", range(N_PODS))
def test_a_pod_that_is_preempted_alone_is_replaced_while_the_others_wait(
    pods: Pods, index: int
) -> None:
    (pods.volume / "hold").touch()
    running = [pods.start(number) for number in range(N_PODS)]
    pods.wait_for("step 20\n")
    container.process_one(running[index]).send_signal(signal.SIGTERM)
    assert running[index].wait(DEADLINE_S) == 143, pods.text(index)

    running[index] = pods.start(index)
    assert [pod.wait(DEADLINE_S) for pod in running] == [0] * N_PODS, pods.text()
    assert counting_program.result(2 if index == 0 else 1) in pods.text()
