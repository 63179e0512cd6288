"""Nodes that end in the middle of a run without an error: a signal to one node, or an exit."""

from __future__ import annotations

import signal
import textwrap
from pathlib import Path

import pytest

from tests.dmiddleware.launch.ditask_process import start
from tests.variants import mostly_slow

pytestmark = [pytest.mark.process, pytest.mark.timeout(180)]

PROGRAM = """
    import faulthandler, multiprocessing, os, signal, sys, threading, time
    from pathlib import Path
    from dmiddleware import Context, Task, middleware

    def run(end, event, role="collector"):
        happened = threading.Event()
        with Task(Context()) as task:

            class Work:
                roles = ["learner", "collector", "evaluator"]

                def __call__(self, ctx):
                    if task.has_role(role) and ctx.total_step == 3:
                        with open("starts", "a") as starts:
                            starts.write("x")
                        if Path("starts").read_text() == "x":
                            end()
                        else:
                            task.emit("worked", only_remote=True)
                            if event == "worked" and task.has_role("learner"):
                                task.stop("all done")
                    if happened.wait(0.01) and task.has_role("learner"):
                        task.stop("all done")

                def close(self):
                    Path(f"closed-{task.router.node_id}").write_text(str(task.stop_reason))

            if task.has_role("learner"):
                task.on(event, lambda *args, **kwargs: happened.set())
            task.use(Work()).run()

    ENDS = {
        "SIGTERM": lambda: os.kill(os.getpid(), signal.SIGTERM),
        "SIGINT": lambda: os.kill(os.getpid(), signal.SIGINT),
        "SIGUSR1": lambda: os.kill(os.getpid(), signal.SIGUSR1),
        "SIGHUP": lambda: os.kill(os.getpid(), signal.SIGHUP),
        "exit": sys.exit,
        "exit_0": lambda: sys.exit(0),
        "os_exit": lambda: os._exit(0),
    }

    def until(event, name, role="collector"):
        return lambda: run(ENDS[name], event, role)

    for name in ENDS:
        globals()[f"{name}_then_worked"] = until("worked", name)
        globals()[f"{name}_then_left"] = until("node.left", name)
        globals()[f"{name}_of_the_learner"] = until("worked", name, "learner")

    def exit_outside_of_run():
        with Task(Context()) as task:
            if task.has_role("learner"):
                sys.exit(0)
            task.use(lambda ctx: None).run()

    def exit_before_the_task():
        with open(f"starts-{os.environ['WHO']}", "a") as starts:
            starts.write("x")
        if os.environ["WHO"] == "collector" and Path("starts-collector").read_text() == "x":
            sys.exit()
        with Task(Context()) as task:

            @middleware(roles=["learner", "collector", "evaluator"])
            def work(ctx):
                task.stop("all done")

            task.use(work).run()

    def handles_its_own_signals():
        seen = []
        signal.signal(signal.SIGUSR1, lambda number, frame: seen.append(number))
        faulthandler.register(signal.SIGUSR2)
        ready, is_ready = os.pipe()
        worker = os.fork()
        if worker == 0:
            os.write(is_ready, b"x")
            threading.Event().wait(30)
            os._exit(1)
        os.read(ready, 1)

        def step(ctx):
            signal.raise_signal(signal.SIGUSR1)
            signal.raise_signal(signal.SIGUSR2)

        with Task(Context()) as task:
            task.use(step).run(max_step=3)
        os.kill(worker, signal.SIGTERM)
        print("signals:", len(seen), "worker:", os.waitpid(worker, 0)[1], flush=True)

    def exit_everywhere():
        sys.exit(0)

    def exit_at_the_end():
        with Task(Context()) as task:
            task.use(lambda ctx: None).run(max_step=2)
        sys.exit()
"""
SIGNALS = ["SIGTERM", "SIGINT", "SIGUSR1", "SIGHUP"]
EXITS = ["exit", "exit_0", "os_exit"]
SAYS = {
    **{name: f"received {name}" for name in SIGNALS},
    "exit": "it called sys.exit(None)",
    "exit_0": "it called sys.exit(0)",
    "os_exit": "exit code 0 before its program had finished",
}


def ditask(folder: Path, function: str, *options: str) -> tuple[int, str]:
    (folder / "program.py").write_text(textwrap.dedent(PROGRAM))
    roles = ("--roles", "learner=1,collector=1")
    with start(folder, "--main", f"program.{function}", *roles, *options) as launcher:
        text, _ = launcher.communicate(timeout=150)
    return launcher.returncode, text


@pytest.mark.parametrize("name", mostly_slow(SIGNALS, keep=1))
def test_a_signal_to_one_node_aborts_the_run_with_its_exit_code(tmp_path: Path, name: str) -> None:
    code, text = ditask(tmp_path, f"{name}_then_worked")
    assert code == 128 + signal.Signals[name], text
    assert f"the run failed: node 1 (collector) failed: {SAYS[name]}" in text
    # All nodes end in order, the one that received the signal included.
    assert SAYS[name] in (tmp_path / "closed-1").read_text()
    assert SAYS[name] in (tmp_path / "closed-0").read_text()


@pytest.mark.parametrize("name", mostly_slow(EXITS, keep=1))
def test_a_node_that_exits_early_aborts_the_run(tmp_path: Path, name: str) -> None:
    code, text = ditask(tmp_path, f"{name}_then_worked")
    assert code == 1, text
    assert "the run failed: node 1 (collector) failed: " in text and SAYS[name] in text


@pytest.mark.parametrize("name", mostly_slow([*SIGNALS, *EXITS], keep=[6]))
def test_a_node_that_ends_early_is_restarted(tmp_path: Path, name: str) -> None:
    code, text = ditask(tmp_path, f"{name}_then_worked", "--on-failure", "restart")
    assert code == 0, text
    assert SAYS[name] in text and "restarting it in 0.5 s (restart 1 of 3)" in text
    assert (tmp_path / "starts").read_text() == "xx"


@pytest.mark.parametrize("name", mostly_slow(["SIGTERM", *EXITS], keep=[2]))
def test_the_run_can_continue_without_a_node_that_ends_early(tmp_path: Path, name: str) -> None:
    code, text = ditask(tmp_path, f"{name}_then_left", "--on-failure", "continue")
    assert code == 0, text
    assert SAYS[name] in text and "the run continues without it" in text
    assert (tmp_path / "closed-0").read_text() == "all done"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SIGTERM", "exit_0", "os_exit"])
def test_a_learner_that_ends_early_is_restarted(tmp_path: Path, name: str) -> None:
    code, text = ditask(tmp_path, f"{name}_of_the_learner", "--on-failure", "restart")
    assert code == 0, text
    assert "node 0 (learner) failed: " in text and SAYS[name] in text and "restart 1 of 3" in text


def test_an_exit_before_the_first_step_is_early(tmp_path: Path) -> None:
    code, text = ditask(tmp_path, "exit_outside_of_run")
    assert code == 1, text
    assert "node 0 (learner) failed: it called sys.exit(0)" in text


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "expected"), [("abort", 1), ("restart", 0)])
def test_an_exit_of_one_node_before_its_task_is_early(
    tmp_path: Path, policy: str, expected: int
) -> None:
    variables = ("--env", "learner:WHO=learner", "--env", "collector:WHO=collector")
    code, text = ditask(tmp_path, "exit_before_the_task", "--on-failure", policy, *variables)
    assert code == expected, text
    assert "node 1 (collector) failed: it called sys.exit(0) before it built a task" in text


def test_signals_that_the_program_handles_do_not_end_its_node(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(textwrap.dedent(PROGRAM))
    main = ("--main", "program.handles_its_own_signals")
    with start(tmp_path, *main) as launcher:
        text, _ = launcher.communicate(timeout=150)
    assert launcher.returncode == 0, text
    # A worker that was forked ends as usual.
    assert f"signals: 3 worker: {int(signal.SIGTERM)}" in text


def test_a_program_may_exit_in_all_nodes(tmp_path: Path) -> None:
    code, text = ditask(tmp_path, "exit_everywhere")
    assert code == 0, text


def test_an_exit_after_the_run_is_the_end_of_the_program(tmp_path: Path) -> None:
    code, text = ditask(tmp_path, "exit_at_the_end")
    assert code == 0, text
