"""Processes that outlive the node that started them, and what a killed launcher leaves."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from dmiddleware.launch.leftovers import end_processes, is_mark, marked_environment, new_mark
from tests.dmiddleware.launch.ditask_process import node_processes, start
from tests.faults.process_cluster import alive
from tests.variants import mostly_slow
from tests.waiting import wait_until

pytestmark = [pytest.mark.process, pytest.mark.timeout(180)]

PROGRAM = """
    import atexit, ctypes, multiprocessing, os, signal, subprocess, sys
    from multiprocessing import shared_memory
    from pathlib import Path
    from dmiddleware import Context, Task

    def note(pid):
        Path(f"pid-{pid}").touch()

    def sleeper(**options):
        note(subprocess.Popen(["sleep", "600"], stdout=subprocess.DEVNULL, **options).pid)

    def daemon():
        # A second fork and a session of its own: it has no other tie to its node.
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                    signal.signal(number, signal.SIG_IGN)
                note(os.getpid())
                signal.pause()
            os._exit(0)
        os.wait()

    def start_all():
        sleeper()
        sleeper(start_new_session=True)
        sleeper(start_new_session=True, env={})
        daemon()

    def ends_well():
        start_all()

    def fails():
        start_all()
        raise ValueError("no")

    def is_killed():
        sleeper()
        sleeper(start_new_session=True)
        daemon()
        os.kill(os.getpid(), signal.SIGKILL)

    def forks_and_exits():
        # What a fork of the node does at its end must not end the node.
        if os.fork() == 0:
            sys.exit(0)
        os.wait()
        Path("alive").touch()

    def forever():
        start_all()
        with Task(Context()) as task:
            task.use(lambda ctx: Path("running").touch()).run()

    def holds_the_interpreter():
        start_all()
        Path("running").touch()
        # Python runs no other thread meanwhile.
        ctypes.PyDLL(None).pause()

    def leaks_shared_memory():
        memory = shared_memory.SharedMemory(create=True, size=16)
        Path("memory").write_text(memory.name)
        Path("running").touch()
        os.kill(os.getpid(), signal.SIGKILL)

    def waits_for_a_process():
        spawn = multiprocessing.get_context("spawn")
        reader, writer = spawn.Pipe(duplex=False)
        spawn.Process(target=work, args=(reader,)).start()
        # Before multiprocessing waits for its processes: the last to register is the first.
        atexit.register(writer.send, "the program has ended")

    def work(reader):
        assert reader.poll(60.0)
        Path("worked").touch()
"""


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "program.py").write_text(textwrap.dedent(PROGRAM))
    yield tmp_path
    for pid in pids(tmp_path):
        if alive(pid):
            os.kill(pid, signal.SIGKILL)


def pids(folder: Path) -> list[int]:
    return [int(path.name.partition("-")[2]) for path in folder.glob("pid-*")]


def ended(folder: Path, count: int) -> Callable[[], bool]:
    return lambda: len(pids(folder)) == count and not any(map(alive, pids(folder)))


def temporary(folder: Path) -> list[Path]:
    return [*folder.glob("ditask-*"), *(folder / "memory").glob("ditask-*")]


@pytest.mark.parametrize(
    ("function", "code", "count"),
    mostly_slow([("is_killed", 1, 3), ("ends_well", 0, 4), ("fails", 1, 4)], keep=1),
)
def test_processes_that_a_node_leaves_behind_are_ended(
    folder: Path, function: str, code: int, count: int
) -> None:
    with start(folder, "--main", f"program.{function}") as launcher:
        text, _ = launcher.communicate(timeout=120)
    assert launcher.returncode == code, text
    assert ended(folder, count)(), text
    assert f"nded {count} processes" in text


@pytest.mark.parametrize("function", mostly_slow(["holds_the_interpreter", "forever"], keep=1))
def test_a_killed_launcher_leaves_no_process_and_no_folder(folder: Path, function: str) -> None:
    (folder / "memory").mkdir()
    n_nodes = "2" if function == "forever" else "1"
    options = ("--shared-memory", "memory", "--kill-after", "3", "--parallel-workers", n_nodes)
    count = 8 if function == "forever" else 4
    with start(folder, "--main", f"program.{function}", *options) as launcher:
        wait_until(lambda: len(pids(folder)) == count, "all processes", deadline_s=60)
        wait_until((folder / "running").exists, "the nodes", deadline_s=60)
        nodes = node_processes(launcher)
        assert temporary(folder)
        launcher.kill()
        launcher.wait(10)
        wait_until(lambda: not any(map(psutil.pid_exists, [n.pid for n in nodes])), "the nodes")
        wait_until(lambda: not temporary(folder), "the folders to be removed")
        # Without an environment and in a session of its own, only its parent shows whose it is.
        wait_until(ended(folder, count), "the other processes")


def test_the_next_launcher_ends_what_a_launcher_and_its_guard_have_left(folder: Path) -> None:
    with start(folder, "--main", "program.holds_the_interpreter") as launcher:
        wait_until((folder / "running").exists, "the node", deadline_s=60)
        (guard,) = [
            process
            for process in psutil.process_iter()
            if process.pid != launcher.pid and _has_open(process, folder / "ditask-")
        ]
        guard.kill()
        launcher.kill()
    left = temporary(folder)
    assert left
    with start(folder, "--main", "program.forks_and_exits") as launcher:
        text, _ = launcher.communicate(timeout=120)
    assert launcher.returncode == 0, text
    assert not any(path.exists() for path in left)
    assert ended(folder, 4)()


def test_a_fork_of_a_node_ends_nothing(folder: Path) -> None:
    with start(folder, "--main", "program.forks_and_exits") as launcher:
        text, _ = launcher.communicate(timeout=120)
    assert launcher.returncode == 0, text
    assert (folder / "alive").exists()


@pytest.mark.slow
def test_a_process_that_python_waits_for_may_finish(folder: Path) -> None:
    with start(folder, "--main", "program.waits_for_a_process") as launcher:
        text, _ = launcher.communicate(timeout=120)
    assert launcher.returncode == 0, text
    assert (folder / "worked").exists()
    assert "left behind" not in text


def test_the_shared_memory_of_a_killed_node_is_freed(folder: Path) -> None:
    with start(folder, "--main", "program.leaks_shared_memory") as launcher:
        launcher.communicate(timeout=120)
    assert not Path("/dev/shm", (folder / "memory").read_text()).exists()


def test_other_processes_are_not_ended() -> None:
    mark, other = new_mark(), new_mark()
    assert is_mark(mark) and not is_mark(mark[:-1]) and not is_mark("")
    commands = [
        subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, env=environment)
        for environment in (
            marked_environment(secrets.token_hex(12), mark),
            marked_environment(other),
        )
    ]
    assert end_processes((mark,)) == 1
    assert commands[0].wait(10) == -signal.SIGTERM
    assert commands[1].poll() is None
    assert end_processes((other,)) == 1
    commands[1].wait(10)
    for command in commands:
        assert command.stdin is not None
        command.stdin.close()


def _has_open(process: psutil.Process, prefix: Path) -> bool:
    try:
        return any(file.path.startswith(str(prefix)) for file in process.open_files())
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False
