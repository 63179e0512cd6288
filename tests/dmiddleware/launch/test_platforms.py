"""Placement from recorded environments of Slurm and Kubernetes."""

from __future__ import annotations

import pytest

from dmiddleware.errors import LaunchError
from dmiddleware.launch.platforms import expand_slurm_hosts, place

SLURM = {
    "SLURM_JOB_ID": "4711",
    "SLURM_JOB_NODELIST": "gpu[01-02,07]",
    "SLURM_NTASKS": "3",
    "SLURM_NNODES": "3",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
    "SLURM_TASKS_PER_NODE": "1(x3)",
}
K8S_JOB = {
    "HOSTNAME": "train-2-x7k9q",
    "POD_NAME": "train-2",
    "POD_IP": "10.8.0.12",
    "JOB_COMPLETION_INDEX": "2",
    "DITASK_REPLICAS": "3",
    "DITASK_SERVICE": "train.rl.svc.cluster.local",
}
K8S_SET = {
    "HOSTNAME": "train-0",
    "DITASK_REPLICAS": "2",
    "DITASK_SERVICE": "train",
}


def test_slurm_gives_the_index_and_the_hosts() -> None:
    placement = place("slurm", SLURM)
    assert (placement.index, placement.count) == (1, 3)
    assert (placement.address, placement.first_address) == ("gpu02", "gpu01")
    assert placement.attach_to == ("tcp://gpu01:25515",)
    assert place("slurm", SLURM | {"SLURM_PROCID": "0"}).attach_to == ()


def test_hosts_that_use_tls_dial_over_tls() -> None:
    placement = place("slurm", SLURM, scheme="tls+tcp")
    assert placement.attach_to == ("tls+tcp://gpu01:25515",)


def test_an_indexed_job_of_kubernetes_gives_the_index() -> None:
    placement = place("k8s", K8S_JOB, port=6000)
    assert (placement.index, placement.count, placement.address) == (2, 3, "10.8.0.12")
    assert placement.attach_to == ("tcp://train-0.train.rl.svc.cluster.local:6000",)


def test_a_stateful_set_of_kubernetes_gives_the_index() -> None:
    placement = place("k8s", K8S_SET)
    assert (placement.index, placement.address) == (0, "train-0.train")


def test_without_a_platform_there_is_one_launcher() -> None:
    assert place("local", {}).count == 1


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("node1", ["node1"]),
        ("a,b", ["a", "b"]),
        ("gpu[08-11]", ["gpu08", "gpu09", "gpu10", "gpu11"]),
        ("a[1,3-4],login", ["a1", "a3", "a4", "login"]),
        ("r[1-2]-ib", ["r1-ib", "r2-ib"]),
    ],
)
def test_host_lists_are_expanded(text: str, hosts: list[str]) -> None:
    assert expand_slurm_hosts(text) == hosts


@pytest.mark.parametrize(
    ("platform", "env", "message"),
    [
        ("slurm", {}, "SLURM_PROCID is not set"),
        ("slurm", SLURM | {"SLURM_PROCID": "x"}, "is not a number"),
        ("slurm", SLURM | {"SLURM_PROCID": "3"}, "does not fit"),
        ("slurm", SLURM | {"SLURM_NTASKS": "6"}, "6 tasks on 3 hosts"),
        ("slurm", SLURM | {"SLURM_JOB_NODELIST": "a[x-y]"}, "not a range"),
        ("k8s", {"DITASK_REPLICAS": "2", "HOSTNAME": "pod"}, "JOB_COMPLETION_INDEX"),
        ("k8s", K8S_JOB | {"DITASK_REPLICAS": "2"}, "does not fit"),
        ("k8s", {k: v for k, v in K8S_SET.items() if k != "DITASK_SERVICE"}, "DITASK_SERVICE"),
    ],
)
def test_missing_and_malformed_variables_are_named(
    platform: str, env: dict[str, str], message: str
) -> None:
    with pytest.raises(LaunchError, match=message):
        place(platform, env)  # type: ignore[arg-type]
