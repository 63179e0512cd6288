"""Nodes that meet at a barrier, started by ``ditask --main``.

Each writes when it arrived and when it passed to the folder ``BARRIER_FOLDER``. The last node
arrives after the others, so late that they would have passed if they did not wait for it.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from dmiddleware import Task
from dmiddleware.pipeline import Context
from middleware import Barrier

DEADLINE_S = 60.0


def main() -> None:
    """Meet once."""
    folder = Path(os.environ["BARRIER_FOLDER"])
    with Task(Context()) as task:
        assert task.router is not None
        node_id = task.router.node_id

        def arrive(ctx: Context) -> None:
            if node_id == 2:
                wait_for([folder / "arrived-0", folder / "arrived-1"])
                time.sleep(0.5)
            note("arrived")

        def note(what: str) -> None:
            now = time.monotonic()
            (folder / f"{what}-{node_id}").write_text(str(now))

        task.use(arrive).use(Barrier()).use(lambda ctx: note("passed")).run(max_step=1)


def wait_for(paths: list[Path]) -> None:
    """Wait until all the files exist."""
    deadline = time.monotonic() + DEADLINE_S
    while not all(path.exists() for path in paths):
        if time.monotonic() > deadline:
            raise TimeoutError(f"{[str(path) for path in paths]} do not exist after {DEADLINE_S} s")
        time.sleep(0.01)
