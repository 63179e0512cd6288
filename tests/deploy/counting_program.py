"""A program that draws numbers and adds them up, to compare a run that was stopped with another.

The tests copy this file to the folder of a run. Only its learner imports torch, which takes longer
than the rest of the program.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dmiddleware import Context, Task, kept, middleware

N_STEPS = 120
HELD_AT = 20
SEED = 7
DEADLINE_S = 90.0


@dataclass
class Counters(Context):
    """What a snapshot needs of a context."""

    train_iter: int = kept(0)


class Sum:
    """Adds up a random number in each step, and counts how often the run was started.

    If the current folder has the file ``hold``, the first start waits in a step until it is stopped
    or a peer has left and is back.
    """

    roles = ("learner",)

    def __init__(self) -> None:
        self.total = 0.0
        self.steps = 0
        self.starts = 1

    def state_dict(self) -> dict[str, Any]:
        return {"total": self.total, "steps": self.steps, "starts": self.starts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.total, self.steps = state["total"], state["steps"]
        self.starts = state["starts"] + 1

    def __call__(self, ctx: Counters) -> None:
        if (self.steps, self.starts) == (HELD_AT, 1) and Path("hold").exists():
            for event in ("node.left", "node.rejoined"):
                ctx.task.wait_for(event, DEADLINE_S)
        self.total += random.random()
        self.steps += 1
        if self.steps % 10 == 0:
            print("step", self.steps, flush=True)
        if self.steps == N_STEPS:
            ctx.task.stop("drawn all numbers")


@middleware(roles=["collector", "evaluator"])
def idle(ctx: Counters) -> None:
    ctx.task.wait_for("the end", 2 * DEADLINE_S)


def result(starts: int) -> str:
    """Return the last line of a run that was started so often."""
    numbers = random.Random(SEED)
    total = 0.0
    for _ in range(N_STEPS):
        total += numbers.random()
    return f"sum {total!r} after {N_STEPS} steps and {starts} starts"


def main() -> None:
    added = Sum()
    with Task(Counters()) as task:
        task.use(added).use(idle)
        if task.has_role("learner"):
            from middleware import RunFolder, SnapshotSaver

            snapshots = SnapshotSaver(RunFolder.create("sum", resume=True))
            task.use(snapshots)
            random.seed(SEED)
            snapshots.resume(task)  # also the state of the random generator
        task.run()
        if task.has_role("learner") and task.stop_reason == "drawn all numbers":
            print(f"sum {added.total!r} after {added.steps} steps and {added.starts} starts")


def fail() -> None:
    raise ValueError("bad reward")


def main_without_snapshots() -> None:
    with Task(Counters()) as task:

        @middleware(roles=["learner"])
        def write(ctx: Counters) -> None:
            from middleware import RunFolder

            (RunFolder.create("sum").path / "file").touch()
            ctx.task.stop("written")

        task.use(write).use(idle).run()
