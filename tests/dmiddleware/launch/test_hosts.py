"""One ditask per host with Slurm's variables; loopback addresses stand for the hosts."""

from __future__ import annotations

import json
import socket
import subprocess
import textwrap
from pathlib import Path

import pytest

from tests.dmiddleware.launch import ditask_process
from tests.variants import mostly_slow

pytestmark = [pytest.mark.process, pytest.mark.timeout(180)]

PROGRAM = """
    from dmiddleware import Context, Task, middleware

    def main():
        with Task(Context()) as task:

            @middleware(roles=["learner"])
            def learn(ctx):
                print("peers at the first step:", sorted(task.router.peer_ids()), flush=True)
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
    folder: Path, index: int, *options: str, port: int, roles: list[str] = ROLES
) -> subprocess.Popen[str]:
    spec = json.dumps({"roles": roles, "port": port})
    job = JOB | {"SLURM_PROCID": str(index), "SLURM_NTASKS": str(len(roles))}
    job["SLURM_JOB_NODELIST"] = f"127.0.0.[2-{len(roles) + 1}]"
    return ditask_process.start(folder, *OPTIONS, *options, "--platform-spec", spec, env=job)


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
