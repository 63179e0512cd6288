"""Runs in which a node fails, under each --on-failure policy."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import textwrap
from pathlib import Path

import psutil
import pytest

from tests.dmiddleware.launch.ditask_process import DITASK
from tests.variants import mostly_slow

pytestmark = [pytest.mark.process, pytest.mark.timeout(180)]

# The evaluator fails in its first n_failures starts, which it counts in a file.
PROGRAM = """
    import os, signal, subprocess, sys, threading
    from pathlib import Path
    from dmiddleware import Context, Task, middleware

    def run(n_failures=0, end_with="evaluated", learner_fails=False, stop_ok=True):
        happened = threading.Event()
        with Task(Context()) as task:

            @middleware(roles=["learner"])
            def learn(ctx):
                if learner_fails:
                    raise RuntimeError("cannot learn")
                if happened.wait(0.01):
                    ctx.task.stop("all done" if stop_ok else "it diverged", ok=stop_ok)

            @middleware(roles=["evaluator"])
            def evaluate(ctx):
                if ctx.total_step == 0:
                    with open("starts", "a") as starts:
                        starts.write("x")
                    n_starts = len(Path("starts").read_text())
                    if n_starts <= n_failures:
                        raise ValueError(f"start {n_starts} fails")
                    ctx.task.emit("evaluated", only_remote=True)
                    print("evaluated in start", n_starts, flush=True)
                threading.Event().wait(0.01)

            if task.has_role("learner"):
                task.on(end_with, lambda *args, **kwargs: happened.set())
            task.use(learn).use(evaluate).run()
            print("stopped:", task.stop_reason, task.stopped_ok)

    def fail_once():
        run(n_failures=1)

    def fail_always():
        run(n_failures=99)

    def continue_without():
        run(n_failures=99, end_with="node.left")

    def diverge():
        run(stop_ok=False)

    def cannot_learn():
        run(learner_fails=True)

    def fails_then_another_ends_it(failing):
        left = threading.Event()
        with Task(Context()) as task:
            fails = task.has_role(failing)

            @middleware(roles=["learner", "collector", "evaluator"])
            def act(ctx):
                if fails:
                    raise RuntimeError("cannot act")
                if left.wait(0.01):
                    ctx.task.stop("all done")

            if not fails:
                task.on("node.left", lambda *args, **kwargs: left.set())
            task.use(act).run()

    def end_in_the_first_step():
        first = not Path("started").exists()

        class Learner:
            roles = ["learner"]

            def __call__(self, ctx):
                Path("started").touch()
                if first:
                    raise RuntimeError("cannot learn")
                ctx.task.stop("all done")

            def close(self):
                # The evaluator ends before this process, which has taken one step.
                threading.Event().wait(0.0 if first else 2.0)

        @middleware(roles=["evaluator"])
        def evaluate(ctx):
            threading.Event().wait(0.01)

        with Task(Context()) as task:
            task.use(Learner()).use(evaluate).run()

    def without_a_collector():
        fails_then_another_ends_it("collector")

    def without_a_learner():
        fails_then_another_ends_it("learner")

    def cut_off():
        left = threading.Event()
        with Task(Context()) as task:

            @middleware(roles=["learner"])
            def learn(ctx):
                if left.wait(0.01):
                    ctx.task.stop("all done")

            @middleware(roles=["collector"])
            def collect(ctx):
                if ctx.total_step == 0:
                    ctx.task.router.close()  # from now on it receives nothing
                threading.Event().wait(0.01)
                if ctx.total_step > 2000:
                    raise TimeoutError("nobody reported the end of the run")

            if task.has_role("learner"):
                task.on("node.left", lambda *args, **kwargs: left.set())
            task.use(learn).use(collect).run()

    def exit_well():
        sys.exit(0)

    def exit_badly():
        sys.exit(3)

    def die_with_a_worker():
        worker = subprocess.Popen(["sleep", "600"], stdout=subprocess.DEVNULL)
        Path("worker").write_text(str(worker.pid))
        os.kill(os.getpid(), signal.SIGKILL)
"""


def ditask(
    folder: Path, function: str, *options: str, roles: str = "learner=1,evaluator=1"
) -> tuple[int, str]:
    (folder / "program.py").write_text(textwrap.dedent(PROGRAM))
    done = subprocess.run(
        [*DITASK, "--main", f"program.{function}", "--roles", roles, *options],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=150,
        env={**os.environ, "TMPDIR": str(folder)},
        check=False,
    )
    return done.returncode, done.stdout


def test_a_node_that_fails_is_restarted(tmp_path: Path) -> None:
    code, text = ditask(tmp_path, "fail_once", "--on-failure", "restart")
    assert code == 0, text
    assert "[node 1] ValueError: start 1 fails" in text
    failure = r"failed: ValueError: start 1 fails \(program.py:\d+\)"
    assert re.search(failure + r"; log: .*; restarting it in 0.5 s \(restart 1 of 3\)", text), text
    assert "[node 1] evaluated in start 2" in text


def test_restarts_wait_longer_each_time_and_have_a_limit(tmp_path: Path) -> None:
    code, text = ditask(tmp_path, "fail_always", "--on-failure", "restart", "--max-restarts", "2")
    assert code == 1, text
    assert "restarting it in 0.5 s (restart 1 of 2)" in text
    assert "restarting it in 1 s (restart 2 of 2)" in text
    assert "stopping the run: node 1 (evaluator) failed: ValueError: start 3 fails" in text
    assert "--max-restarts 2" in text
    assert (tmp_path / "starts").read_text() == "xxx"


def test_a_run_can_continue_without_a_failed_node(tmp_path: Path) -> None:
    code, text = ditask(tmp_path, "continue_without", "--on-failure", "continue")
    assert code == 0, text
    assert "the run continues without it (--on-failure continue)" in text
    assert (tmp_path / "starts").read_text() == "x"


def test_a_run_fails_when_its_learner_fails(tmp_path: Path) -> None:
    code, text = ditask(tmp_path, "cannot_learn", "--on-failure", "restart", "--max-restarts", "0")
    assert code == 1, text
    assert "node 0 (learner) failed: RuntimeError: cannot learn" in text


def test_a_run_that_was_stopped_as_failed_is_not_restarted(tmp_path: Path) -> None:
    code, text = ditask(tmp_path, "diverge", "--on-failure", "restart")
    assert code == 1, text
    assert "[node 0] stopped: it diverged False" in text
    assert "[node 1] stopped: node 0: it diverged False" in text
    assert (tmp_path / "starts").read_text() == "x"


def test_no_node_is_restarted_after_the_run_is_over(tmp_path: Path) -> None:
    code, text = ditask(tmp_path, "continue_without", "--on-failure", "restart")
    assert code == 0, text
    assert "node 1 (evaluator) is no longer needed: the run is over" in text


@pytest.mark.parametrize(
    ("failing", "roles"),
    mostly_slow([("learner", ""), ("collector", "collector=1,evaluator=1")], keep=1),
)
def test_a_node_is_not_restarted_when_others_have_ended_the_run(
    tmp_path: Path, failing: str, roles: str
) -> None:
    restart = ("--on-failure", "restart", "--start-timeout", "60")
    roles = roles or "learner=1,evaluator=1"
    code, text = ditask(tmp_path, f"without_a_{failing}", *restart, roles=roles)
    if failing == "learner":
        # The learner's last step is missing, and with it the best policy.
        assert code == 1, text
        assert "not restarting node 0 (learner): the run has ended without it" in text
    else:
        assert code == 0, text
        assert "node 0 (collector) is no longer needed: the run is over" in text
    assert "peers within" not in text


@pytest.mark.slow
def test_a_restarted_learner_may_end_the_run_in_its_first_step(tmp_path: Path) -> None:
    code, text = ditask(tmp_path, "end_in_the_first_step", "--on-failure", "restart")
    assert code == 0, text
    assert "restart 1 of 3" in text


@pytest.mark.slow
def test_a_node_that_lost_its_peers_is_stopped_when_the_run_is_over(tmp_path: Path) -> None:
    code, text = ditask(tmp_path, "cut_off", roles="learner=1,collector=1")
    assert code == 0, text
    assert "node 1 (collector) has not heard that the run is over; stopping it" in text


@pytest.mark.parametrize(("function", "expected"), [("exit_well", 0), ("exit_badly", 1)])
def test_a_program_may_set_its_exit_code(tmp_path: Path, function: str, expected: int) -> None:
    code, text = ditask(tmp_path, function, roles="learner=1")
    assert code == expected, text
    assert ("SystemExit: 3" in text) == bool(expected)
    assert "SystemExit: 0" not in text


@pytest.mark.slow
def test_the_children_of_a_killed_node_are_killed(tmp_path: Path) -> None:
    code, text = ditask(tmp_path, "die_with_a_worker", roles="learner=1")
    assert code == 1
    assert "node 0 (learner) was killed by SIGKILL" in text
    with contextlib.suppress(psutil.NoSuchProcess):
        worker = psutil.Process(int((tmp_path / "worker").read_text()))
        # The system may take a moment to reap it.
        assert worker.status() == psutil.STATUS_ZOMBIE or worker.wait(60) is None
