"""ditask over tls+tcp: both sides need certificates of the same authority."""

from __future__ import annotations

import subprocess
import textwrap
from pathlib import Path

import pytest

from tests.dmiddleware.launch import ditask_process
from tests.dmiddleware.router.certificates import Authority

pytestmark = [pytest.mark.process, pytest.mark.timeout(180)]

PROGRAM = """
    import threading
    from dmiddleware import Context, Task, middleware

    def main():
        taken = {}
        with Task(Context()) as task:

            @middleware(roles=["collector"])
            def collect(ctx):
                threading.Event().wait(0.01)
                ctx.task.emit("number", task.router.node_id, only_remote=True)

            @middleware(roles=["learner"])
            def learn(ctx):
                threading.Event().wait(0.01)
                if len(taken) == 2:
                    ctx.task.stop("got both")

            if task.has_role("learner"):
                task.on("number", lambda node: taken.setdefault(node))
            task.use(collect).use(learn).run()
            print("ended:", task.stop_reason, flush=True)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "program.py").write_text(textwrap.dedent(PROGRAM))
    ditask_process.write_key(tmp_path / "key")
    return tmp_path


def start(folder: Path, authority: Authority, *options: str) -> subprocess.Popen[str]:
    return ditask_process.start(
        folder, "--main", "program.main", "--protocol", "tls+tcp", "--key-file", "key",
        "--tls-ca", authority.ca, "--tls-cert", authority.issue("host"), *options,
    )  # fmt: skip


def address_of(run: subprocess.Popen[str]) -> str:
    assert run.stdout is not None
    for line in run.stdout:
        if " listens on " in line:
            return line.strip().rpartition(" ")[2]
    pytest.fail("the run ended before it listened")


def test_nodes_join_over_tls_with_a_trusted_certificate_only(folder: Path) -> None:
    ours, theirs = Authority(folder, "ours"), Authority(folder, "theirs")
    join = ("--roles", "collector=1", "--topology", "alone", "--attach-to")
    with start(folder, ours, "--roles", "learner=1,collector=1", "--topology", "star") as run:
        address = address_of(run)
        assert address.startswith("tls+tcp://127.0.0.1:")
        with start(folder, theirs, *join, address, "--start-timeout", "3") as stranger:
            text, _ = stranger.communicate(timeout=80)
            assert stranger.returncode == 1
            assert f"the certificate of {address} was refused" in text
        with start(folder, ours, *join, address) as joined:
            for launcher in (run, joined):
                text, _ = launcher.communicate(timeout=80)
                assert launcher.returncode == 0, text
                assert "got both" in text
