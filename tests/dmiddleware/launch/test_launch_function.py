"""launch(): a run that a program or a notebook starts and holds."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from dmiddleware.errors import LaunchError, WaitTimeout
from dmiddleware.launch import launch
from tests.variants import mostly_slow
from tests.waiting import wait_until

pytestmark = [
    pytest.mark.process,
    pytest.mark.timeout(120),
    pytest.mark.usefixtures("warm_processes"),
]

# Without a main guard, and with what the function needs outside of it.
PROGRAM = """
    from pathlib import Path
    from dmiddleware import Context, Task, middleware
    from dmiddleware.launch import launch

    N_STEPS = 4

    def main():
        with Task(Context()) as task:
            @middleware(roles=["learner"])
            def learn(ctx):
                Path("learned").touch()

            @middleware(roles=["collector"])
            def collect(ctx):
                pass

            task.use(learn).use(collect).run(max_step=N_STEPS)
            print("ends", task.router.node_id, flush=True)
            return {"node": task.router.node_id, "steps": N_STEPS}

    print("started")
    with launch(main, roles={"collector": 1, "learner": 1}, log_dir="logs") as run:
        print("result", run.result(60.0))
        print("phases", sorted({one.phase for one in run.status().values()}))
"""


@pytest.mark.parametrize("how", mostly_slow(["file", "notebook"], keep=1))
def test_a_program_without_a_main_guard_starts_itself_in_two_processes(
    tmp_path: Path, how: str
) -> None:
    program = textwrap.dedent(PROGRAM)
    (tmp_path / "program.py").write_text(program)
    # A notebook has no file either.
    command = [sys.executable, "program.py"] if how == "file" else [sys.executable, "-"]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        input=program if how == "notebook" else None,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines.count("started") == 1
    assert "result {'node': 1, 'steps': 4}" in lines
    assert "phases ['finished']" in lines
    assert "[node 0] ends 0" in lines and "[node 1] ends 1" in lines
    assert (tmp_path / "learned").exists() and (tmp_path / "logs" / "node-1.log").exists()


def forever(started: Path) -> None:
    from dmiddleware import Context, Task

    def step(ctx: Context) -> None:
        started.touch()
        task.wait_for("the end", 600.0)

    with Task(Context()) as task:
        task.use(step).run()


def by_value(function: Callable[..., object], *arguments: object) -> Callable[[], object]:
    """Return the function with its arguments, to be sent as it is: test modules have no names."""
    import functools

    import cloudpickle

    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    return functools.partial(function, *arguments)


def test_a_run_can_be_stopped_and_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    main = by_value(forever, tmp_path / "started")
    with launch(main, parallel_workers=2, show=False) as run:
        wait_until((tmp_path / "started").exists, "the first step", deadline_s=60)
        with pytest.raises(WaitTimeout, match=r"still running after 0.1 s; node 0"):
            run.wait(0.1)
        assert run.running and set(run.status()) == {0, 1}
        assert run.stop() == 130
        assert not run.running and run.stop() == 130
        with pytest.raises(LaunchError, match="stopped"):
            run.result()
    assert capfd.readouterr().out == ""


@pytest.mark.parametrize("in_block", [False, True])
def test_an_interrupted_wait_says_that_the_run_continues(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    in_block: bool,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FORCE_COLOR", "1")  # as a notebook does
    main = by_value(forever, tmp_path / "started")
    waiter = threading.get_ident()

    def interrupt() -> None:
        wait_until((tmp_path / "started").exists, "the first step", deadline_s=60)
        wait_until(lambda: _is_in(waiter, "wait"), "the wait for the run", deadline_s=60)
        signal.pthread_kill(waiter, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    run = launch(main, parallel_workers=2)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        if in_block:
            with run:
                run.result()
        else:
            run.result()
    thread.join()
    assert run.running != in_block
    assert run.stop() == 130
    output = capsys.readouterr().out
    assert ("the run continues: wait() or result()" in output) != in_block
    assert "\x1b[2K" not in output


def _is_in(thread: int, function: str) -> bool:
    """Return whether a thread is in the function of a run."""
    frame = sys._current_frames().get(thread)
    while frame is not None:
        if frame.f_code.co_name == function and frame.f_code.co_filename.endswith("launch/run.py"):
            return True
        frame = frame.f_back
    return False


def test_the_end_of_the_caller_ends_the_run(tmp_path: Path) -> None:
    program = textwrap.dedent("""
        import os, threading
        from pathlib import Path
        from dmiddleware import Context, Task
        from dmiddleware.launch import launch

        def main():
            def step(ctx):
                Path(f"pid-{os.getpid()}").touch()
                task.wait_for("the end", 600.0)
            with Task(Context()) as task:
                task.use(step).run()

        launch(main, parallel_workers=2)
        threading.Event().wait()
    """)
    caller = subprocess.Popen([sys.executable, "-c", program], cwd=tmp_path)
    try:
        wait_until(lambda: len(list(tmp_path.glob("pid-*"))) == 2, "both nodes", deadline_s=60)
        caller.send_signal(signal.SIGKILL)
        caller.wait(30)
        pids = [int(file.name.removeprefix("pid-")) for file in tmp_path.glob("pid-*")]
        wait_until(lambda: not any(map(psutil.pid_exists, pids)), "their ends", deadline_s=60)
    finally:
        caller.kill()


def test_a_failure_is_raised_with_its_first_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    def fail() -> None:
        raise ZeroDivisionError("of this program")

    with launch(by_value(fail), show=False) as run:
        with pytest.raises(LaunchError, match="ZeroDivisionError: of this program"):
            run.result(60.0)
        assert run.wait() == 1


def test_a_result_that_cannot_be_sent_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    def lock() -> object:
        import threading

        return threading.Lock()

    with (
        launch(by_value(lock), show=False) as run,
        pytest.raises(LaunchError, match="cannot be pickled"),
    ):
        run.result(60.0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rols": {"learner": 1}}, "unknown setting rols; did you mean roles"),
        ({"protocol": "udp"}, "must be one of 'ipc', 'tcp', 'tls\\+tcp', got 'udp'"),
        ({"max_restarts": -1}, "max_restarts must be an integer ≥ 0, got -1"),
        ({"start_timeout": 0.0}, "start_timeout must be a positive number, got 0"),
        ({"kill_after": "long"}, "kill_after must be a number"),
        ({"resources": {"learner": {"tpu": 1}}}, "only Ray knows 'tpu'"),
        ({"tls_ca": "ca.pem"}, "for --protocol tls"),
        ({"platform": "ray", "ports": [5000]}, "--ports has no use with --platform ray"),
    ],
)
def test_options_are_checked_before_anything_starts(
    options: dict[str, object], message: str
) -> None:
    with pytest.raises(LaunchError, match=message):
        launch("program.main", **options)  # type: ignore[arg-type]


def test_what_cannot_be_sent_is_refused_before_anything_starts() -> None:
    lock = threading.Lock()
    with pytest.raises(LaunchError, match="inside of the function"):
        launch(by_value(lambda: lock))
    with pytest.raises(LaunchError, match="needs a function or its name"):
        launch(7)  # type: ignore[arg-type]
