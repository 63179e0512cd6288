"""A run whose learner ends in a given way: the program of :mod:`tests.faults.restart_faults`.

``ditask`` runs :func:`main`. The collector emits numbers, and the learner writes those that it has
handled to its ledger. In its first start the learner ends half way.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from pathlib import Path

from dmiddleware import Context, Event, Task, middleware
from tests.faults.ledger import Ledger, Writer

__all__ = ["main"]

QUIET_S = 5.0


def main() -> None:
    """Run one node; the figures are in the environment."""
    count, ends = int(os.environ["FAULT_COUNT"]), os.environ["FAULT_ENDS"]
    folder, slow_s = Path.cwd(), float(os.environ["FAULT_SLOW_S"])
    # A handled event would survive a learner that raises too, but the default must do so as well.
    event = Event("number", acknowledged="accepted" if ends == "raises" else "handled")
    threading.Event().wait(slow_s)
    # The ledger is closed after the task, which handles its last events when it is closed.
    with contextlib.ExitStack() as files, Task(Context()) as task:
        path = folder / f"{task.router.node_id}.ledger"  # type: ignore[union-attr]
        write = files.enter_context(Writer(path))
        write("started", os.getpid())
        arrived = threading.Event()

        @middleware(roles=["collector"])
        def collect(ctx: Context) -> None:
            if ctx.total_step < count:
                ctx.task.emit(event, ctx.total_step, only_remote=True)
                write("sent", ctx.total_step)
                # The learner fails before it has been sent everything.
                threading.Event().wait(0.005)
            else:
                ctx.task.wait_for("the end", 600.0)

        @middleware(roles=["learner"])
        def learn(ctx: Context) -> None:
            lines = ledger.lines("got")
            if is_first and len(lines) >= count // 3:
                if ends == "raises":
                    raise RuntimeError("the learner fails")
                os.kill(os.getpid(), signal.SIGKILL)
            quiet_s = time.monotonic() - max([started_at, *(line[1] for line in lines)])
            if len({line[2] for line in lines}) == count or quiet_s > QUIET_S:
                ctx.task.stop("enough")
            arrived.wait(0.1)
            arrived.clear()

        def note(number: int) -> None:
            write("got", number)
            arrived.set()

        if task.has_role("learner"):
            ledger = Ledger(path)
            is_first = len(ledger.lines("started")) == 1
            started_at = time.monotonic()
            threading.Event().wait(slow_s)
            task.on(event, note)
        task.use(collect).use(learn).run()
