"""One ditask per host with Slurm's variables; loopback addresses stand for the hosts."""

from __future__ import annotations

import json
import socket
import subprocess
import textwrap
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

import pytest

from dmiddleware.launch.platforms import slurm_step
from tests.dmiddleware.launch import ditask_process
from tests.variants import mostly_slow

pytestmark = [pytest.mark.process, pytest.mark.timeout(180)]

PROGRAM = """
    from dmiddleware import Context, Task, middleware
    from dmiddleware.pipeline import current_node

    def main():
        with Task(Context()) as task:

            @middleware(roles=["learner"])
            def learn(ctx):
                print("peers at the first step:", sorted(task.router.peer_ids()), flush=True)
                print("of the run", current_node().run_id)
                ctx.task.stop("all connected")

            @middleware(roles=["collector", "evaluator"])
            def idle(ctx):
                pass

            task.use(learn).use(idle).run()
            print("ended:", task.stop_reason, flush=True)
"""

OPTIONS = (
    "--main", "program.main", "--platform", "slurm", "--protocol", "tcp", "--key-file", "key",
)  # fmt: skip
ROLES = ["learner,evaluator", "collector=2", "collector"]
JOB = {"SLURM_JOB_ID": "4711"}


def start(
    folder: Path,
    index: int,
    *options: str,
    port: int | None,
    roles: list[str] = ROLES,
    job: Mapping[str, str] = JOB,
) -> subprocess.Popen[str]:
    spec = json.dumps({"roles": roles} | ({} if port is None else {"port": port}))
    variables = {**job, "SLURM_PROCID": str(index), "SLURM_NTASKS": str(len(roles))}
    variables["SLURM_JOB_NODELIST"] = f"127.0.0.[2-{len(roles) + 1}]"
    options = (*OPTIONS, *options, "--platform-spec", spec)
    return ditask_process.start(folder, *options, env=variables)


def free_port(host: str) -> int:
    with socket.create_server((host, 0)) as server:
        port: int = server.getsockname()[1]
        return port


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "program.py").write_text(textwrap.dedent(PROGRAM))
    ditask_process.write_key(tmp_path / "key")
    return tmp_path


def test_the_first_node_waits_for_the_nodes_of_all_hosts(folder: Path) -> None:
    port = free_port("127.0.0.2")
    with start(folder, 0, port=port) as first:
        assert first.stdout is not None
        line = first.stdout.readline()
        while f"listens on tcp://127.0.0.2:{port}" not in line:
            line = first.stdout.readline()
            assert line
        with (
            start(folder, 1, port=port) as second,
            start(folder, 2, port=port) as third,
        ):
            for launcher in (second, third, first):
                text, _ = launcher.communicate(timeout=80)
                assert launcher.returncode == 0, text
    assert "peers at the first step: [1, 1000, 1001, 2000]" in text


@pytest.mark.parametrize(
    ("options",), mostly_slow([(("--topology", "mesh"),), (("--bind", "0.0.0.0"),)], keep=1)
)
def test_the_learner_may_be_on_any_host_and_anywhere_in_its_roles(
    folder: Path, options: tuple[str, ...]
) -> None:
    roles = ["collector=2", "evaluator,learner"]
    port = free_port("127.0.0.3")
    with (
        start(folder, 0, *options, port=port, roles=roles) as first,
        start(folder, 1, *options, port=port, roles=roles) as second,
    ):
        for launcher in (first, second):
            text, _ = launcher.communicate(timeout=80)
            assert launcher.returncode == 0, text
    bound = f" (bound to tcp://0.0.0.0:{port})" if "--bind" in options else ""
    assert f"node 1001 listens on tcp://127.0.0.3:{port}{bound}" in text
    assert "peers at the first step: [0, 1, 1000]" in text


ARRAY = {"SLURM_JOB_ID": "4713", "SLURM_ARRAY_JOB_ID": "4712"}
OTHER_JOBS = {
    "another job": {"SLURM_JOB_ID": "4712", "SLURM_STEP_ID": "0"},
    "another task of an array": ARRAY | {"SLURM_ARRAY_TASK_ID": "3", "SLURM_STEP_ID": "0"},
    "another step": JOB | {"SLURM_STEP_ID": "1"},
}
FIRST_STEP = JOB | {"SLURM_STEP_ID": "0"}


@pytest.mark.parametrize("other", mostly_slow(OTHER_JOBS, keep=1))
def test_runs_on_the_same_hosts_with_one_key_do_not_mix(folder: Path, other: str) -> None:
    roles = ["learner", "collector"]
    jobs = (FIRST_STEP, OTHER_JOBS[other])
    # A collector waits for its own learner, also while only the other learner listens.
    order = [(jobs[0], 0), (jobs[1], 1), (jobs[0], 1), (jobs[1], 0)]
    with ExitStack() as stack:
        launchers = [
            stack.enter_context(start(folder, index, port=None, roles=roles, job=job))
            for job, index in order
        ]
        texts = [launcher.communicate(timeout=80)[0] for launcher in launchers]
        assert [launcher.returncode for launcher in launchers] == [0] * 4, texts
    for number in (0, 3):
        assert "peers at the first step: [1000]" in texts[number]
        assert f"of the run {slurm_step(order[number][0])}" in texts[number]


def test_only_processes_that_name_the_run_of_the_job_may_join_it(folder: Path) -> None:
    roles, port = ["learner", "collector"], free_port("127.0.0.2")
    join = ("--main", "program.main", "--protocol", "tcp", "--key-file", "key", "--roles",
            "collector=1", "--attach-to", f"tcp://127.0.0.2:{port}")  # fmt: skip
    with (
        start(folder, 0, "--run-id", "mine", port=port, roles=roles, job=FIRST_STEP) as learner,
        start(folder, 1, port=port, roles=roles, job=OTHER_JOBS["another step"]) as other,
    ):
        text, _ = other.communicate(timeout=80)
        assert other.returncode == 1
        assert "'mine-slurm-4711.0'" in text and "'slurm-4711.1'" in text
        with ditask_process.start(folder, *join, "--run-id", "mine-slurm-4711.0") as joined:
            for launcher in (joined, learner):
                text, _ = launcher.communicate(timeout=80)
                assert launcher.returncode == 0, text
    assert "(--run-id mine-slurm-4711.0)" in text
