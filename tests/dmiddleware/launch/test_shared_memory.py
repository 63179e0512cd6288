"""ditask with shared memory: nodes exchange large arrays through it and leave nothing behind."""

from __future__ import annotations

import subprocess
import textwrap
from pathlib import Path

import psutil
import pytest

from tests.dmiddleware.launch import ditask_process
from tests.variants import mostly_slow
from tests.waiting import wait_until

pytestmark = [pytest.mark.process, pytest.mark.timeout(180)]

# The learner stops after ten arrays and reports whether they were in shared memory.
PROGRAM = """
    import sys, threading
    import numpy as np
    from pathlib import Path
    from dmiddleware import Context, Task, middleware

    def is_shared(array):
        address = array.__array_interface__["data"][0]
        for line in Path("/proc/self/maps").read_text().splitlines():
            start, _, end = line.split()[0].partition("-")
            if int(start, 16) <= address < int(end, 16):
                return ".slab" in line

    def main(needed=10):
        arrived = []
        with Task(Context()) as task:

            @middleware(roles=["collector"])
            def collect(ctx):
                threading.Event().wait(0.01)
                array = np.full(400_000, ctx.total_step, np.float32)
                ctx.task.emit("array", array, only_remote=True)

            @middleware(roles=["learner"])
            def learn(ctx):
                threading.Event().wait(0.01)
                if len(arrived) >= needed:
                    ctx.task.stop(f"{set(arrived)}")

            def on_array(array):
                assert (array == array[0]).all()
                arrived.append(is_shared(array))
                if arrived.count(True) == 1:
                    print("got one", flush=True)

            if task.has_role("learner"):
                task.on("array", on_array)
            task.use(collect).use(learn).run()
            print("ended:", task.stop_reason, flush=True)

    def forever():
        main(needed=10**9)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "program.py").write_text(textwrap.dedent(PROGRAM))
    (tmp_path / "memory").mkdir()
    return tmp_path


def start(folder: Path, main: str, *options: str) -> subprocess.Popen[str]:
    roles = ("--roles", "learner=1,collector=1")
    return ditask_process.start(folder, "--main", main, *roles, *options)


def left_slabs(folder: Path) -> list[Path]:
    return list((folder / "memory").glob("ditask-*/*.slab"))


@pytest.mark.parametrize("protocol", mostly_slow(["ipc", "tcp"], keep=1))
def test_arrays_are_in_shared_memory_which_is_removed_at_the_end(
    folder: Path, protocol: str
) -> None:
    options = ("--protocol", protocol, "--shared-memory", "memory")
    with start(folder, "program.main", *options) as launcher:
        text, _ = launcher.communicate(timeout=80)
    assert launcher.returncode == 0, text
    assert "ended: {True}" in text
    assert list((folder / "memory").iterdir()) == []


def test_without_a_folder_arrays_are_sent(folder: Path) -> None:
    with start(folder, "program.main", "--shared-memory", "") as launcher:
        text, _ = launcher.communicate(timeout=80)
    assert launcher.returncode == 0, text
    assert "ended: {False}" in text or "ended: {None}" in text


def test_shared_memory_is_used_by_default(folder: Path) -> None:
    with start(folder, "program.main") as launcher:
        text, _ = launcher.communicate(timeout=80)
    assert "ended: {True}" in text


def test_the_arrays_of_a_killed_run_are_removed(folder: Path) -> None:
    with start(folder, "program.forever", "--shared-memory", "memory") as launcher:
        assert launcher.stdout is not None
        assert any("got one" in line for line in launcher.stdout)
        wait_until(lambda: bool(left_slabs(folder)), "a slab", deadline_s=60)
        workers = ditask_process.node_processes(launcher)
        # The launcher last: its processes notice its death at once, and remove what they use.
        for process in (*workers, launcher):
            process.kill()
        _, alive = psutil.wait_procs(workers, timeout=60)
        assert alive == []
    memory = folder / "memory"
    wait_until(lambda: not list(memory.iterdir()), "the guard to remove the folder", deadline_s=60)
