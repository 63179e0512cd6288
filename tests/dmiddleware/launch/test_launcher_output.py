"""ditask whose own output cannot be written, and the logs of its processes."""

from __future__ import annotations

import contextlib
import os
import pty
import resource
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import IO, Any

import psutil
import pytest

from tests.dmiddleware.launch.ditask_process import DITASK, start
from tests.waiting import wait_until

pytestmark = [pytest.mark.process, pytest.mark.timeout(180)]

PROGRAM = """
    import os, sys
    from pathlib import Path
    from dmiddleware import Context, Task

    def count():
        with Task(Context()) as task:

            def step(ctx):
                print("step", ctx.total_step, flush=True)
                if ctx.total_step == 0:
                    Path("running").touch()
                if ctx.total_step == 2000:
                    ctx.task.stop("counted")

            task.use(step).run()
            Path("ended").write_text(f"{task.stop_reason} after {task.ctx.total_step}")

    def forever():
        with Task(Context()) as task:
            task.use(lambda ctx: Path("running").touch()).run()
            print("last words", flush=True)
            Path("ends").write_text(task.stop_reason)
            Path("ends").rename("ended")  # whole, where the test sees it

    def one_long_line():
        for _ in range(60):
            sys.stdout.write("x" * 1_000_000)
        sys.stdout.flush()

    def progress_bar():
        for percent in range(0, 101, 50):
            sys.stderr.write(f"\\r{percent}%")
        sys.stderr.write("\\n")

    def fail_once():
        print("a start", flush=True)
        if not Path("second").exists():
            Path("second").touch()
            raise ValueError("fails once")

    def die():
        print("last words", flush=True)
        os.abort()
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "program.py").write_text(textwrap.dedent(PROGRAM))
    return tmp_path


def launch(
    folder: Path, function: str, *options: str, stdout: int | IO[Any], stderr: int = subprocess.PIPE
) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*DITASK, "--main", f"program.{function}", *options],
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        text=True,
        env={**os.environ, "TMPDIR": str(folder)},
        start_new_session=True,
    )


def log(folder: Path, node_id: int = 0) -> str:
    (path,) = folder.glob(f"logs/*/node-{node_id}.log")
    return path.read_text()


@pytest.mark.slow
def test_a_run_goes_on_when_its_output_is_full(folder: Path) -> None:
    with Path("/dev/full").open("w") as full:
        launcher = launch(folder, "count", stdout=full)
        _, errors = launcher.communicate(timeout=120)
    assert launcher.returncode == 0, errors
    assert (folder / "ended").read_text() == "counted after 2000"
    assert errors.count("No space left on device") == 1
    assert "step 2000\n" in log(folder)


def test_a_run_goes_on_when_its_output_is_closed(folder: Path) -> None:
    # As in `ditask … | head -1`.
    launcher = launch(folder, "count", stdout=subprocess.PIPE)
    assert launcher.stdout is not None
    launcher.stdout.readline()
    launcher.stdout.close()
    assert launcher.stderr is not None
    with launcher.stderr as stderr:
        errors = stderr.read()
    assert launcher.wait(120) == 0, errors
    assert (folder / "ended").read_text() == "counted after 2000"
    assert errors.count("Broken pipe") == 1


@pytest.mark.slow
def test_a_run_goes_on_when_nothing_reads_its_output(folder: Path) -> None:
    # As in `ditask … | less`.
    read_end, write_end = os.pipe()
    with os.fdopen(write_end, "w") as pipe:
        os.set_blocking(write_end, False)
        with pytest.raises(BlockingIOError):
            while True:
                os.write(write_end, b"x" * 4096)
        os.set_blocking(write_end, True)
        launcher = launch(folder, "count", stdout=pipe)
    _, errors = launcher.communicate(timeout=120)
    os.close(read_end)
    assert launcher.returncode == 0, errors
    assert (folder / "ended").read_text() == "counted after 2000"


def test_a_run_whose_terminal_goes_away_is_stopped_in_order(folder: Path) -> None:
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(folder)
        os.environ["TMPDIR"] = str(folder)
        # The tests may run with nohup, which ignores it.
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        os.execv(sys.executable, [*DITASK, "--main", "program.forever"])
    os.set_blocking(terminal, False)

    def is_running() -> bool:
        with contextlib.suppress(BlockingIOError):
            os.read(terminal, 1 << 16)
        return (folder / "running").exists()

    wait_until(is_running, "the first step", deadline_s=60)
    os.close(terminal)  # the system sends SIGHUP, and every further write fails
    assert psutil.Process(pid).wait(60) == 128 + signal.SIGHUP
    assert "SIGHUP" in (folder / "ended").read_text()
    (notes,) = folder.glob("logs/*/ditask.log")
    assert "the run was stopped: received SIGHUP" in notes.read_text()


def test_nohup_keeps_a_run_going(folder: Path) -> None:
    def ignore_hangup() -> None:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)

    launcher = subprocess.Popen(
        [*DITASK, "--main", "program.forever"],
        cwd=folder,
        stdout=subprocess.DEVNULL,
        env={**os.environ, "TMPDIR": str(folder)},
        preexec_fn=ignore_hangup,
    )
    wait_until((folder / "running").exists, "the first step", deadline_s=60)
    launcher.send_signal(signal.SIGHUP)
    launcher.send_signal(signal.SIGTERM)
    assert launcher.wait(60) == 128 + signal.SIGTERM
    assert "SIGTERM" in (folder / "ended").read_text()


def test_a_closed_standard_output_is_no_error(folder: Path) -> None:
    command = " ".join(["exec", sys.executable, "-c", f"'{DITASK[2]}'", "--main program.count >&-"])
    done = subprocess.run(
        ["sh", "-c", command],
        cwd=folder,
        env={**os.environ, "TMPDIR": str(folder)},
        stderr=subprocess.PIPE,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert (folder / "ended").read_text() == "counted after 2000"


def test_a_long_line_takes_linear_time_and_bounded_memory_and_the_log_has_it_all(
    folder: Path,
) -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with start(folder, "--main", "program.one_long_line") as launcher:
        text, _ = launcher.communicate(timeout=150)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert launcher.returncode == 0, text
    (line,) = [line for line in text.splitlines() if line.startswith("[node 0] x")]
    assert line == f"[node 0] {'x' * 8192} … ({60_000_000 - 8192:,} more bytes)"
    assert log(folder).count("x" * 1000) == 60_000
    # Most of it is spent on imports.
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 20.0


def test_progress_bars_are_shown_step_by_step(folder: Path) -> None:
    with start(folder, "--main", "program.progress_bar") as launcher:
        text, _ = launcher.communicate(timeout=120)
    for percent in (0, 50, 100):
        assert f"[node 0] {percent}%\n" in text
    assert "\r0%\r50%\r100%\n" in (next(folder.glob("logs/*/node-0.log"))).read_bytes().decode()


def test_a_log_has_the_output_of_all_starts_with_a_line_between(folder: Path) -> None:
    options = ("--on-failure", "restart", "--log-dir", "output")
    with start(folder, "--main", "program.fail_once", *options) as launcher:
        text, _ = launcher.communicate(timeout=120)
    assert launcher.returncode == 0, text
    starts = (folder / "output" / "node-0.log").read_text().split("=== ditask: ")
    assert [part.splitlines()[0].split(",")[0] for part in starts[1:]] == [
        "start of node 0 (all roles)",
        "restart 1 of node 0 (all roles)",
    ]
    assert "a start\n" in starts[1] and "ValueError: fails once" in starts[1]
    assert "a start\n" in starts[2]
    assert "log: output/node-0.log; restarting it" in text


def test_a_failure_ends_with_the_last_output_and_the_path_of_the_log(folder: Path) -> None:
    with start(folder, "--main", "program.die") as launcher:
        text, _ = launcher.communicate(timeout=120)
    assert launcher.returncode == 1
    (path,) = folder.glob("logs/*/node-0.log")
    assert f"(all of it: {path.relative_to(folder)})" in text.split("last output of node 0")[1]
    assert "[ditask]   last words\n" in text
    last = text.splitlines()[-1]
    program = (folder / "program.py").read_text().splitlines()
    line = program.index("    os.abort()") + 1
    failure = f"node 0 (all roles) was killed by SIGABRT (program.py:{line})"
    assert last == f"[ditask] the run failed: {failure}"


def test_a_node_writes_to_its_log_when_its_launcher_is_killed(folder: Path) -> None:
    with start(folder, "--main", "program.forever") as launcher:
        wait_until((folder / "running").exists, "the first step", deadline_s=60)
        launcher.kill()
        wait_until((folder / "ended").exists, "the end of the node", deadline_s=60)
    assert (folder / "ended").read_text() == "the launcher has died"
    assert log(folder).endswith("last words\n")


def test_logs_that_cannot_be_written_end_no_run(folder: Path) -> None:
    (folder / "output").mkdir()
    (folder / "output" / "node-0.log").symlink_to("/dev/full")
    with start(folder, "--main", "program.count", "--log-dir", "output") as launcher:
        text, _ = launcher.communicate(timeout=120)
    assert launcher.returncode == 0, text
    assert text.count("could not write to output/node-0.log: No space left on device") == 1
