"""Nodes that meet at a barrier, started by ``ditask --main``.

Each writes when it arrived and when it passed to the folder ``BARRIER_FOLDER``. The last node
arrives when it has received the arrivals of the others. They would pass if they did not wait.
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

from dmiddleware import Task
from dmiddleware.pipeline import Context
from middleware import Barrier
from middleware.barrier import Arrival
from middleware.exchange.events import REACHED

DEADLINE_S = 60.0


def main() -> None:
    """Meet once."""
    folder = Path(os.environ["BARRIER_FOLDER"])
    with Task(Context()) as task:
        assert task.router is not None
        node_id = task.router.node_id

        def arrive(ctx: Context) -> None:
            if node_id == 2:
                assert others_arrived.wait(DEADLINE_S), f"only {arrived} have arrived"
            note("arrived")

        def note(what: str) -> None:
            now = time.monotonic()
            (folder / f"{what}-{node_id}").write_text(str(now))

        def on_reached(_name: str, _sender: int, *arrival: Any) -> None:
            if Arrival(*arrival).n_times:
                arrived.add(Arrival(*arrival).node_id)
            if arrived >= {0, 1}:
                others_arrived.set()

        arrived: set[int] = set()
        others_arrived = threading.Event()
        task.on(REACHED, on_reached)
        task.use(arrive).use(Barrier()).use(lambda ctx: note("passed")).run(max_step=1)
