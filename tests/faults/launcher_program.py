"""The program of the faults of the launcher: every node starts a worker and a daemon."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from pathlib import Path

from dmiddleware import Context, Task

__all__ = ["main"]


def main() -> None:
    """Run until the task is stopped, and then write the reason to a file."""
    _note("worker", subprocess.Popen(["sleep", "600"]).pid)
    _start_daemon()
    with Task(Context()) as task:

        def step(ctx: Context) -> None:
            if ctx.total_step == 0:
                _note("node", os.getpid())
            print("step", ctx.total_step, flush=True)
            threading.Event().wait(0.001)  # the work of a step

        task.use(step).run()
        Path(f"ended.{os.getpid()}").write_text(task.stop_reason or "")


def _start_daemon() -> None:
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            _note("daemon", os.getpid())
            signal.pause()
        os._exit(0)
    os.wait()


def _note(what: str, pid: int) -> None:
    Path(f"{what}.{pid}").touch()
