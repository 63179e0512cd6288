"""Trains in the run folder that its argument names until it is killed, in a process of its own."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

from dmiddleware import Task
from middleware import RunFolder, SnapshotSaver


def main() -> None:
    """Say when the folder is held; its first step does not end."""
    with Task() as task:
        task.use(SnapshotSaver(RunFolder(Path(sys.argv[1]))))
        task.use(lambda ctx: print("holds", flush=True))
        task.use(lambda ctx: signal.pause())
        task.run()


if __name__ == "__main__":
    main()
