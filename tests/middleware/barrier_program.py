"""Nodes that meet at a barrier, started by ``ditask --main``.

Each writes when it arrived and when it passed to the folder ``BARRIER_FOLDER``. The last node
arrives a second after the others.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from dmiddleware import Task
from dmiddleware.pipeline import Context
from middleware import Barrier


def main() -> None:
    """Meet once."""
    with Task(Context()) as task:
        assert task.router is not None
        node_id = task.router.node_id
        times: list[float] = []

        def note(ctx: Context) -> None:
            if not times and node_id == 2:
                time.sleep(1.0)
            times.append(time.monotonic())

        task.use(note).use(Barrier()).use(note).run(max_step=1)
    path = Path(os.environ["BARRIER_FOLDER"], str(node_id))
    path.write_text(" ".join(map(str, times)))
