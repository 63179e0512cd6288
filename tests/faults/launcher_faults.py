"""Faults of the launcher: it is killed, or its output cannot be written."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil

from tests.dmiddleware.launch.ditask_process import DITASK
from tests.faults.fault_result import FaultResult
from tests.faults.process_cluster import ROOT
from tests.waiting import wait_until

__all__ = ["full_output", "killed_launcher"]

_NODES = 2
_PER_NODE = 3
_START_S = 60.0
_KILL_AFTER_S = 5.0


def killed_launcher(transport: str, *, kills: int) -> FaultResult:
    """Kill a launcher whose nodes have started workers and daemons, repeatedly.

    Args:
        transport: only ``ipc``.
        kills: number of kills.
    """
    result = FaultResult(f"kill -9 of ditask, {kills} times", transport)
    ended, took_s, left = 0, [], 0
    for _ in range(kills):
        with _launch(subprocess.DEVNULL) as (launcher, folder):
            processes = _processes(folder)
            launcher.kill()
            took_s.append(
                wait_until(lambda: not _alive(processes), "the processes", deadline_s=_START_S)  # noqa: B023
            )
            wait_until(lambda: not _folders(folder), "the guard", deadline_s=_START_S)
            ended += len(list(folder.glob("ended.*")))
            left += len(_folders(folder))
    expected = kills * _NODES
    result.check("nodes stop in order", f"{ended} of {expected}", ended == expected)
    result.at_most("all processes have ended", max(took_s), _KILL_AFTER_S + 3.0)
    result.check("nothing is left", f"{left} folders", not left)
    return result


def full_output(transport: str) -> FaultResult:
    """Let every write to standard output fail, and stop the run after a while.

    Args:
        transport: only ``ipc``.
    """
    result = FaultResult("standard output is /dev/full", transport)
    with Path("/dev/full").open("w") as full, _launch(full) as (launcher, folder):
        processes = _processes(folder)
        launcher.send_signal(signal.SIGTERM)
        code = launcher.wait(_START_S)
        ended = len(list(folder.glob("ended.*")))
        result.check("nodes stop in order", f"{ended} of {_NODES}", ended == _NODES)
        logs = [path.read_text() for path in folder.glob("logs/*/node-*.log")]
        complete = sum("step 0\n" in text for text in logs)
        result.check(
            "the exit code is that of the run, and the logs are complete",
            f"exit code {code}, {complete} of {_NODES} logs",
            code == 128 + signal.SIGTERM and complete == _NODES,
        )
        left = len(_alive(processes))
        result.check("nothing is left", f"{left} processes", not left)
    return result


@contextlib.contextmanager
def _launch(stdout: object) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    with tempfile.TemporaryDirectory(prefix="faults-") as name:
        folder = Path(name)
        options = ["--main", "tests.faults.launcher_program.main", "--parallel-workers"]
        options += [str(_NODES), "--kill-after", str(_KILL_AFTER_S)]
        launcher = subprocess.Popen(
            [*DITASK, *options],
            cwd=folder,
            stdout=stdout,  # type: ignore[call-overload]
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": name},
        )
        try:
            count = _NODES * _PER_NODE
            wait_until(lambda: len(_pids(folder)) == count, "the nodes", deadline_s=_START_S)
            yield launcher, folder
        finally:
            for process in _processes(folder):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            launcher.kill()
            launcher.wait(_START_S)


def _pids(folder: Path) -> list[int]:
    return [
        int(path.suffix[1:])
        for what in ("node", "worker", "daemon")
        for path in folder.glob(f"{what}.*")
    ]


def _processes(folder: Path) -> list[psutil.Process]:
    found = []
    for pid in _pids(folder):
        with contextlib.suppress(psutil.NoSuchProcess):
            found.append(psutil.Process(pid))
    return found


def _alive(processes: list[psutil.Process]) -> list[psutil.Process]:
    alive = []
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.status() != psutil.STATUS_ZOMBIE:
                alive.append(process)
    return alive


def _folders(folder: Path) -> list[Path]:
    return list(folder.glob("ditask-*"))
