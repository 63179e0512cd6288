"""Processes that hang, that do not stop, and that fail again and again."""

from __future__ import annotations

import re
import textwrap
import time
from pathlib import Path

import pytest

from tests.dmiddleware.launch.ditask_process import start
from tests.waiting import wait_until

pytestmark = [pytest.mark.process, pytest.mark.timeout(180)]

PROGRAM = """
    import os, signal, threading
    from pathlib import Path
    from dmiddleware import Context, Task, middleware

    def hang_once(hang):
        with Task(Context()) as task:

            @middleware(roles=["learner"])
            def learn(ctx):
                # Waiting for a peer does not count as a hang.
                ctx.task.wait_for("collected", timeout_s=120.0)
                ctx.task.stop("collected")

            @middleware(roles=["collector"])
            def collect(ctx):
                if ctx.total_step == 3:
                    if not Path("hung").exists():
                        Path("hung").touch()
                        threading.Thread(target=busy, daemon=True).start()
                        hang()
                    ctx.task.emit("collected", only_remote=True)
                    ctx.task.wait_for("the end", timeout_s=120.0)

            task.use(learn).use(collect).run()

    def busy():
        while not threading.Event().wait(0.01):
            pass

    def in_the_main_thread():
        hang_once(lambda: threading.Lock().acquire() and threading.Event().wait())

    def stopped():
        hang_once(lambda: os.kill(os.getpid(), signal.SIGSTOP))

    def before_the_first_step():
        threading.Event().wait()

    def deaf():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        Path("running").touch()
        threading.Event().wait()

    def fail_later():
        starts = len(list(Path(".").glob("start-*")))
        Path(f"start-{starts}").touch()
        if starts < 2:
            raise ValueError("once more")
"""
RESTART = ("--on-failure", "restart")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "program.py").write_text(textwrap.dedent(PROGRAM))
    return tmp_path


def run(folder: Path, function: str, *options: str) -> tuple[int, str]:
    with start(folder, "--main", f"program.{function}", *options) as launcher:
        text, _ = launcher.communicate(timeout=150)
        return launcher.returncode, text


def test_a_node_that_hangs_is_restarted_and_one_that_waits_for_it_is_not(folder: Path) -> None:
    roles = ("--roles", "learner=1,collector=1")
    code, text = run(folder, "in_the_main_thread", *roles, *RESTART, "--hang-timeout", "15")
    assert code == 0, text
    assert re.search(r"node 1 \(collector\) hung: .* for 1\d s; .*killed.*restarting", text), text
    assert "node 0 (learner) hung" not in text
    assert re.search(r"program.py\W.*line \d+ in in_the_main_thread|in <lambda>", text), text


@pytest.mark.slow
def test_a_node_that_was_suspended_is_restarted(folder: Path) -> None:
    roles = ("--roles", "learner=1,collector=1")
    code, text = run(folder, "stopped", *roles, *RESTART, "--hang-timeout", "15")
    assert code == 0, text
    assert "node 1 (collector) hung" in text


@pytest.mark.slow
def test_a_hang_is_a_failure_with_its_name(folder: Path) -> None:
    code, text = run(folder, "before_the_first_step", "--hang-timeout", "8")
    assert code == 1, text
    last = text.splitlines()[-1]
    assert last.startswith("[ditask] the run failed: node 0 (all roles) hung: it made no progress")


def test_nodes_that_do_not_stop_are_killed_after_the_given_time(folder: Path) -> None:
    options = ("--main", "program.deaf", "--kill-after", "1.5")
    with start(folder, *options) as launcher:
        wait_until((folder / "running").exists, "the node", deadline_s=60)
        launcher.terminate()
        stopped_at = time.monotonic()
        text, _ = launcher.communicate(timeout=60)
        took_s = time.monotonic() - stopped_at
    assert launcher.returncode == 143
    assert "did not end within 1.5 s; killed" in text
    assert 1.5 <= took_s < 15.0


def test_restarts_count_only_within_their_window(folder: Path) -> None:
    limits = ("--max-restarts", "1", "--restart-window", "0.01")  # less than a start takes
    code, text = run(folder, "fail_later", *RESTART, *limits)
    assert code == 0, text
    assert text.count("(restart 1 of 1)") == 2


@pytest.mark.slow
def test_restarts_within_their_window_are_limited(folder: Path) -> None:
    limits = ("--max-restarts", "1", "--restart-window", "600")
    code, text = run(folder, "fail_later", *RESTART, *limits)
    assert code == 1, text
    assert text.count("once more; ") <= 1
    assert "--max-restarts 1" in text
    assert len(list(folder.glob("start-*"))) == 2
