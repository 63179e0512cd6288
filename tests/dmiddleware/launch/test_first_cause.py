"""The last line and the exit code of a failed run: the first cause, not what followed from it."""

from __future__ import annotations

import os
import signal
import textwrap
from pathlib import Path

import psutil
import pytest

from tests.dmiddleware.launch.ditask_process import start
from tests.waiting import wait_until

pytestmark = [pytest.mark.process, pytest.mark.timeout(180)]

PROGRAM = """
    import os, threading
    from pathlib import Path
    import psutil
    from dmiddleware import Context, Task, middleware

    # Both are pipes with names: each waits for the other.
    follower, failed = Path("follower"), Path("failed")

    class SlowToClose:
        def __call__(self, ctx):
            self.follower = psutil.Process(int(follower.read_text()))
            raise ValueError("bad reward")

        def close(self):
            Path("closing").touch()
            # Its peer fails and ends before this node has ended.
            failed.write_text("")
            self.follower.wait(60.0)

    def follow(ctx):
        follower.write_text(str(os.getpid()))
        failed.read_text()
        raise TimeoutError("the learner is silent")

    def main():
        with Task(Context()) as task:
            if task.has_role("learner"):
                task.use(SlowToClose())
            else:
                task.use(follow)
            task.run()

    def lose_a_peer():
        with Task(Context()) as task:
            left = threading.Event()

            def step(ctx):
                if ctx.total_step == 0:
                    path = Path(f"node-{task.router.node_id}.new")
                    path.write_text(str(os.getpid()))
                    path.rename(path.stem)
                if left.wait(0.01):
                    raise ConnectionError("my peer is gone")

            task.on("node.left", lambda *args, **kwargs: left.set())
            task.use(step).run()

    def diverge():
        with Task(Context()) as task:
            task.use(lambda ctx: ctx.task.stop("the loss is nan", ok=False)).run()

    def fail_to_close():
        class Broken:
            def __call__(self, ctx):
                raise ValueError("bad reward")

            def close(self):
                raise OSError("and no disk")

        with Task(Context()) as task:
            task.use(Broken()).run()

    def recover():
        with Task(Context()) as task:

            def step(ctx):
                if ctx.total_step == 1:
                    raise ValueError("a hitch")

            try:
                task.use(step).run()
            except ValueError:
                pass
        with Task(Context()) as task:
            task.use(lambda ctx: None).run(max_step=20)
        raise KeyError("the end")

    def fail_at_the_end():
        with Task(Context()) as task:
            task.use(lambda ctx: Path("running").touch()).run()
        raise ValueError("after the stop")
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "program.py").write_text(textwrap.dedent(PROGRAM))
    for name in ("follower", "failed"):
        os.mkfifo(tmp_path / name)
    return tmp_path


def test_the_failure_that_happened_first_is_named_last(folder: Path) -> None:
    options = ("--main", "program.main", "--roles", "learner=1,collector=1", "--kill-after", "30")
    with start(folder, *options) as launcher:
        text, _ = launcher.communicate(timeout=150)
    assert launcher.returncode == 1
    first = "node 0 (learner) failed: ValueError: bad reward (program.py:13)"
    assert text.splitlines()[-1] == f"[ditask] the run failed: {first}"
    assert f"stopping the run: {first}" in text
    assert "node 1 (collector) failed: TimeoutError: the learner is silent" in text


def test_a_failure_before_ctrl_c_sets_the_exit_code(folder: Path) -> None:
    options = ("--main", "program.main", "--roles", "learner=1,collector=1")
    with start(folder, *options) as launcher:
        wait_until((folder / "closing").exists, "the failure", deadline_s=60)
        launcher.send_signal(signal.SIGINT)
        text, _ = launcher.communicate(timeout=60)
    assert launcher.returncode == 1, text
    assert "bad reward" in text.splitlines()[-1]


def test_a_failure_after_ctrl_c_does_not_set_the_exit_code(folder: Path) -> None:
    with start(folder, "--main", "program.fail_at_the_end") as launcher:
        wait_until((folder / "running").exists, "the first step", deadline_s=60)
        launcher.send_signal(signal.SIGINT)
        text, _ = launcher.communicate(timeout=60)
    assert launcher.returncode == 130, text
    assert text.splitlines()[-1] == "[ditask] the run was stopped: received SIGINT (Ctrl-C)"


def test_a_run_that_was_stopped_as_failed_ends_with_its_reason(folder: Path) -> None:
    with start(folder, "--main", "program.diverge", "--parallel-workers", "2") as launcher:
        text, _ = launcher.communicate(timeout=120)
    assert launcher.returncode == 1
    assert "the loss is nan" in text.splitlines()[-1]


def test_a_killed_node_is_the_reason_also_if_its_peer_was_noticed_first(folder: Path) -> None:
    with start(folder, "--main", "program.lose_a_peer", "--parallel-workers", "2") as launcher:
        nodes = [folder / "node-0", folder / "node-1"]
        wait_until(lambda: all(node.exists() for node in nodes), "both nodes", deadline_s=60)
        processes = [psutil.Process(int(node.read_text())) for node in nodes]
        launcher.send_signal(signal.SIGSTOP)
        try:
            processes[1].kill()
            wait_until(
                lambda: processes[0].status() == psutil.STATUS_ZOMBIE,
                "the end of node 0",
                deadline_s=60,
            )
        finally:
            launcher.send_signal(signal.SIGCONT)
        text, _ = launcher.communicate(timeout=60)
    assert launcher.returncode == 1
    assert "node 0 (learner) failed: ConnectionError: my peer is gone" in text
    last = text.splitlines()[-1]
    assert "the run failed: node 1 (collector+evaluator) was killed by SIGKILL" in last


@pytest.mark.parametrize(
    ("function", "error"), [("fail_to_close", "ValueError: bad reward"), ("recover", "KeyError")]
)
def test_an_error_that_follows_or_was_handled_is_not_the_reason(
    folder: Path, function: str, error: str
) -> None:
    with start(folder, "--main", f"program.{function}") as launcher:
        text, _ = launcher.communicate(timeout=120)
    assert launcher.returncode == 1
    assert f"failed: {error}" in text.splitlines()[-1]
