"""ditask --platform ray, on a real cluster of several Ray nodes."""

from __future__ import annotations

import re
import shlex
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from dmiddleware.errors import LaunchError
from dmiddleware.launch.hosts.ray import RayHost, folder_for_ray
from tests.dmiddleware.launch import ditask_process
from tests.dmiddleware.launch.ray_cluster import (
    RayCluster,
    in_namespace,
    ray_cluster,
    rays_environment,
    why_no_ray,
)
from tests.waiting import wait_until

pytestmark = [
    pytest.mark.process,
    pytest.mark.timeout(300),
    pytest.mark.skipif(bool(why_no_ray()), reason=why_no_ray()),
]

# The learner ends once each collector has been heard as often as the file "enough" says.
PROGRAM = """
    import os, sys, threading
    from collections import Counter
    from pathlib import Path
    from dmiddleware import Context, Task, middleware

    enough = Path("enough")
    heard = Counter()

    def main():
        me = os.getpid()
        with Task(Context()) as task:
            task.on("hello", lambda node: heard.update([node]))

            @middleware(roles=["learner"])
            def learn(ctx):
                task.wait_for("hello", 60.0)
                if enough.exists() and min(heard[1], heard[2]) > int(enough.read_text()):
                    task.stop("heard enough")

            @middleware(roles=["collector"])
            def collect(ctx):
                task.emit("hello", task.router.node_id, only_remote=True)
                (Path("seen") / f"{task.router.node_id}-{me}").touch()
                threading.Event().wait(0.02)

            task.use(learn).use(collect).run()
        print("arguments", sys.argv[1:], "ended", task.stop_reason, flush=True)

    def fail():
        print("before the failure", flush=True)
        raise ValueError("the program is wrong")
"""
ROLES = ("--main", "program.main", "--roles", "learner=1,collector=2")

# The chain of examples.cartpole_dqn, whose collector takes as long as one with a simulator.
SLOW_CARTPOLE = """
    import threading, time
    from pathlib import Path
    from dmiddleware import Task, middleware
    from dmiddleware.data import TensorBuffer
    from dmiddleware.env import make_env_manager
    from dmiddleware.policy import DQNPolicy
    from dmiddleware.rl import Schedule
    from middleware import *

    @middleware(roles=[Role.COLLECTOR])
    def wait(ctx):
        threading.Event().wait(0.25)

    def main():
        with Task(seed=0) as task:
            envs = make_env_manager("CartPole-v1", env_num=8, seed=task.seed_for("collector"))
            eval_envs = make_env_manager("CartPole-v1", env_num=30, seed=1)
            policy = DQNPolicy.for_env(
                envs, seed=0, n_step=3, model={"encoder_hidden_sizes": [128, 128]},
                learning_rate=2e-3, target_update_freq=64,
                eps=Schedule.linear(1.0, 0.04, decay=5_000),
            )
            experiment = Experiment("cartpole", policy)
            buffer = TensorBuffer(60_000, seed=task.seed_for("buffer"))
            task.use(ContextExchanger()).use(ModelExchanger(policy))
            task.use(EpsGreedyHandler(policy))
            task.use(StepCollector(policy, envs, n_sample=128, random_steps=1000)).use(wait)
            task.use(DataPusher(buffer))
            task.use(OffPolicyLearner(policy, buffer, update_per_collect=64))
            task.use(InteractionEvaluator(
                policy, eval_envs, n_episode=50, every_train_iter=640, stop_value=495
            ))
            task.use(experiment).use(TerminationChecker(max_env_step=60_000))
            (Path("seen") / f"{task.router.node_id}-{time.time():.0f}").touch()
            task.run()
            print("ended at", task.ctx.env_step, "env steps:", task.stop_reason, flush=True)
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    with ray_cluster(1, 1, 1) as found:
        yield found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "program.py").write_text(textwrap.dedent(PROGRAM))
    (tmp_path / "seen").mkdir()
    return tmp_path


def output(folder: Path) -> str:
    return (folder / "ditask.txt").read_text()


def wait_for_no_actors(cluster: RayCluster) -> None:
    """Wait until the processes of all actors have ended: Ray does not wait for those it kills."""
    wait_until(lambda: cluster.do("actors") == 0, "the end of the actors", deadline_s=30)


def test_the_same_program_runs_on_three_ray_nodes(cluster: RayCluster, folder: Path) -> None:
    (folder / "enough").write_text("5")
    cluster.start(*ROLES, "--", "--seed", "3", cwd=folder)
    code = cluster.wait()
    text = output(folder)
    assert code == 0, text
    assert "3 actors on 3 nodes of the Ray cluster" in text
    for node in range(3):
        assert f"[node {node}] arguments ['--seed', '3'] ended" in text
    logs = [(folder / file).read_text() for file in sorted(folder.glob("logs/*/node-*.log"))]
    hosts = {re.search(r"of Ray node (\S+)", log)[1] for log in logs}  # type: ignore[index]
    assert hosts == {"127.0.0.2", "127.0.0.3", "127.0.0.4"}
    wait_for_no_actors(cluster)


def test_a_failure_ends_the_run_with_its_traceback_and_its_cause(
    cluster: RayCluster, folder: Path
) -> None:
    cluster.start("--main", "program.fail", "--roles", "learner=1,collector=1", cwd=folder)
    code = cluster.wait()
    text = output(folder)
    assert code == 1, text
    assert "before the failure" in text and "Traceback" in text
    assert "failed: ValueError: the program is wrong (program.py:" in text.splitlines()[-1]
    wait_for_no_actors(cluster)


@pytest.mark.slow
def test_too_few_resources_are_named_before_anything_runs(
    cluster: RayCluster, folder: Path
) -> None:
    cluster.start("--main", "program.main", "--roles", "learner=1,collector=4", cwd=folder)
    assert cluster.wait() == 1
    assert "the Ray cluster lacks 2 CPU: the run's 5 nodes need 5 CPU" in output(folder)
    cluster.start(*ROLES, "--resources", "learner:gpu=1,cpu=1", cwd=folder)
    assert cluster.wait() == 1
    assert "no node of the Ray cluster has 1 CPU, 1 GPU for node 0 (learner)" in output(folder)
    assert not list((folder / "seen").iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_the_end_of_the_launcher_ends_the_run(
    cluster: RayCluster, folder: Path, number: signal.Signals
) -> None:
    cluster.start(*ROLES, cwd=folder)
    wait_until(lambda: len(seen(folder)) == 2, "both collectors", deadline_s=60)
    cluster.signal(number)
    assert cluster.wait() == (130 if number == signal.SIGINT else -number)
    wait_for_no_actors(cluster)
    if number == signal.SIGINT:
        text = output(folder)
        # A node may learn of it from another one first.
        assert len(re.findall(r"ended (?:node \d+: )?received SIGINT \(Ctrl-C\)", text)) == 3
        assert "the run was stopped: received SIGINT" in text


@pytest.mark.slow
def test_a_ray_node_that_is_lost_twice_is_replaced(folder: Path) -> None:
    with ray_cluster(2, 1) as cluster:
        lost = "127.0.0.3"
        cluster.start(*ROLES, "--on-failure", "restart", cwd=folder)
        for n_lost in (1, 2):
            n_seen = 1 + n_lost
            wait_until(_has_seen(folder, n_seen), lambda: output(folder), deadline_s=90)
            cluster.remove_node(lost)
            lost = cluster.add_node()
        wait_until(_has_seen(folder, 4), lambda: output(folder), deadline_s=90)
        (folder / "enough").write_text("20")
        code = cluster.wait()
        text = output(folder)
        assert code == 0, text
        assert "restart 2 of 3" in text and "its actor died on Ray node" in text


@pytest.mark.slow
def test_a_job_that_was_submitted_runs_with_its_working_directory(folder: Path) -> None:
    pytest.importorskip("aiohttp_cors", reason="ray[default] is not installed")
    (folder / "enough").write_text("20")
    with ray_cluster(3, takes_jobs=True) as cluster:
        cluster.submit(*ROLES, cwd=folder)
        code = cluster.wait()
        text = output(folder)
        assert code == 0, text
        assert text.count("heard enough") == 3 and "succeeded" in text
        # Ray gives the job a copy of the folder.
        assert not seen(folder)


def seen(folder: Path) -> list[str]:
    return sorted(file.name for file in (folder / "seen").iterdir())


def _has_seen(folder: Path, count: int) -> Callable[[], bool]:
    return lambda: len(seen(folder)) >= count


def test_ray_is_asked_for_only_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(LaunchError, match=r"pip install 'dmiddleware\[ray\]'"):
        RayHost(address="", package=Path(), may_restart=False, timeout_s=1.0)


PRIVATE = """
    import os, stat
    from pathlib import Path
    from dmiddleware import Context, Task

    def main():
        import ray
        with Task(Context()) as task:
            task.use(lambda ctx: None).run(max_step=1)
        session = Path(ray._private.worker._global_node.get_session_dir_path())
        folders = [session, *session.parents]
        closed = [one for one in folders if not one.stat().st_mode & 0o007]
        sockets = list((session / "sockets").iterdir())
        open_sockets = [one for one in sockets if one.stat().st_mode & 0o077]
        Path("made").touch()
        print("closed", closed[-1], len(sockets), open_sockets, oct(Path("made").stat().st_mode))
"""


@pytest.mark.slow
def test_no_other_user_of_the_host_can_enter_the_files_of_a_cluster_that_is_started(
    tmp_path: Path,
) -> None:
    (tmp_path / "program.py").write_text(textwrap.dedent(PRIVATE))
    command = [sys.executable, "-m", "dmiddleware.launch", "--platform", "ray"]
    with rays_environment() as environment:
        Path(environment["RAY_TMPDIR"]).chmod(0o755)
        done = subprocess.run(
            ["sh", "-c", f"umask 022; {shlex.join(in_namespace(*command, '-m', 'program.main'))}"],
            cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200,
        )  # fmt: skip
        left = [path.name for path in Path(environment["RAY_TMPDIR"]).iterdir()]
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.search(r"closed (\S+) (\d+) \[\] 0o100644", done.stdout)
    assert found is not None, done.stdout
    assert Path(found[1]).parent == Path(environment["RAY_TMPDIR"])
    assert int(found[2]) > 0
    assert not [name for name in left if name.startswith("ditask-")]


def test_a_cluster_of_this_host_needs_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert folder_for_ray("") == tmp_path
    assert folder_for_ray("auto") is folder_for_ray("10.0.0.1:6379") is None
    monkeypatch.delenv("RAY_TMPDIR")
    long = tmp_path / ("a" * 40)
    long.mkdir()
    for folder in (tmp_path, long):
        monkeypatch.setattr(tempfile, "tempdir", str(folder))
        assert folder_for_ray("") == Path("/tmp")
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "ray_current_cluster").write_text("10.0.0.1:6379")
    assert folder_for_ray("") is None
    (tmp_path / "ray" / "ray_current_cluster").unlink()
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert folder_for_ray("") is None


def test_a_cluster_that_has_ended_is_named_at_once(tmp_path: Path) -> None:
    host = RayHost(address="127.0.0.1:9", package=tmp_path, may_restart=False, timeout_s=1.0)
    with pytest.raises(LaunchError, match=r"cannot reach a Ray cluster at 127.0.0.1:9"), host:
        pass


@pytest.mark.slow
def test_a_sweep_reports_and_keeps_the_policies_of_its_trials(tmp_path: Path) -> None:
    root = Path(__file__).parents[3]
    command = [sys.executable, "-m", "examples.tune_cartpole", "--samples", "2"]
    command += ["--max-env-step", "2500", "--folder", str(tmp_path)]
    with rays_environment() as environment:
        done = subprocess.run(
            in_namespace(*command), cwd=root, env=environment, capture_output=True, text=True,
            timeout=280,
        )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"best mean return [\d.]+ with .*learning_rate", done.stdout)
    assert list(tmp_path.glob("**/policy.safetensors"))


@pytest.mark.slow
@pytest.mark.learning
@pytest.mark.timeout(1200)
def test_cartpole_is_solved_over_three_ray_nodes(tmp_path: Path) -> None:
    root = Path(__file__).parents[3]
    with ray_cluster(1, 1, 1) as cluster:
        options = ["--package", str(root), "--main", "examples.cartpole_dqn.main"]
        options += ["--roles", "learner=1,collector=1,evaluator=1"]
        cluster.start(*options, cwd=tmp_path)
        code = cluster.wait(900.0)
        text = output(tmp_path)
        assert code == 0, text
        found = re.search(r"mean return ([\d.]+) over 100 fresh episodes", text)
        assert found is not None and float(found[1]) >= 475.0, text


@pytest.mark.slow
@pytest.mark.learning
@pytest.mark.timeout(1200)
def test_cartpole_is_solved_although_a_ray_node_is_lost_twice(folder: Path) -> None:
    (folder / "slow_cartpole.py").write_text(textwrap.dedent(SLOW_CARTPOLE))
    with ray_cluster(1, 1, 1) as cluster:
        cluster.start(
            "--main", "slow_cartpole.main", "--roles", "learner=1,collector=1,evaluator=1",
            "--on-failure", "restart", cwd=folder,
        )  # fmt: skip
        lost = "127.0.0.3"
        for n_lost in (1, 2):
            n_seen = 2 + n_lost
            wait_until(_has_seen(folder, n_seen), lambda: output(folder), deadline_s=120)
            cluster.remove_node(lost)
            lost = cluster.add_node()
        code = cluster.wait(900.0)
        text = output(folder)
        assert code == 0, text
        assert "restart 2 of 3" in text
        found = re.search(r"mean return ([\d.]+) over 100 fresh episodes", text)
        assert found is not None and float(found[1]) >= 475.0, text


@pytest.mark.slow
def test_a_signal_while_ray_starts_has_its_exit_code(folder: Path) -> None:
    with (
        rays_environment() as env,
        ditask_process.start(folder, *ROLES, "--platform", "ray", env=env) as launcher,
    ):
        rays = psutil.Process(launcher.pid)

        def has_begun() -> bool:
            names = [one.name() for one in rays.children(recursive=True)]
            return any("gcs_server" in name for name in names)

        wait_until(has_begun, "the start of Ray", deadline_s=60)
        launcher.terminate()
        text, _ = launcher.communicate(timeout=120)
    assert launcher.returncode == 143, text
    assert "the run was stopped: received SIGTERM" in text
