"""One ditask per host with Slurm's variables; loopback addresses stand for the hosts."""

from __future__ import annotations

import json
import socket
import subprocess
import textwrap
from pathlib import Path

import pytest

from tests.dmiddleware.launch import ditask_process

pytestmark = [pytest.mark.process, pytest.mark.timeout(180)]

PROGRAM = """
    from dmiddleware import Context, Role, Task, middleware

    def main():
        with Task(Context()) as task:

            @middleware(roles=[Role.LEARNER])
            def learn(ctx):
                print("peers at the first step:", sorted(task.router.peer_ids()), flush=True)
                ctx.task.stop("all connected")

            @middleware(roles=[Role.COLLECTOR, Role.EVALUATOR])
            def idle(ctx):
                pass

            task.use(learn).use(idle).run()
            print("ended:", task.stop_reason, flush=True)
"""

OPTIONS = (
    "--main", "program.main", "--platform", "slurm", "--protocol", "tcp", "--key-file", "key",
)  # fmt: skip
ROLES = ["learner,evaluator", "collector=2", "collector"]
JOB = {"SLURM_JOB_ID": "4711", "SLURM_JOB_NODELIST": "127.0.0.[2-4]", "SLURM_NTASKS": "3"}


def start(folder: Path, index: int, *, port: int) -> subprocess.Popen[str]:
    spec = json.dumps({"roles": ROLES, "port": port})
    return ditask_process.start(
        folder, *OPTIONS, "--platform-spec", spec, env=JOB | {"SLURM_PROCID": str(index)}
    )


def free_port(host: str) -> int:
    with socket.create_server((host, 0)) as server:
        port: int = server.getsockname()[1]
        return port


def test_the_first_node_waits_for_the_nodes_of_all_hosts(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(textwrap.dedent(PROGRAM))
    (tmp_path / "key").write_text("k" * 40)
    port = free_port("127.0.0.2")
    with start(tmp_path, 0, port=port) as first:
        assert first.stdout is not None
        line = first.stdout.readline()
        while f"listens on tcp://127.0.0.2:{port}" not in line:
            line = first.stdout.readline()
            assert line
        with (
            start(tmp_path, 1, port=port) as second,
            start(tmp_path, 2, port=port) as third,
        ):
            for launcher in (second, third, first):
                text, _ = launcher.communicate(timeout=80)
                assert launcher.returncode == 0, text
    assert "peers at the first step: [1, 1000, 1001, 2000]" in text
