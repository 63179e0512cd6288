"""The errors that a type checker finds in code that uses the pipeline."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.type_checker import type_check

HEAD = """
from __future__ import annotations
from collections.abc import Generator
from dataclasses import dataclass
from dmiddleware import (
    Context, Middleware, StepTimer, Task, TraceFile, kept, middleware, produced, renewed,
)
from middleware import OnlineRLContext, Role


@dataclass
class CuriousContext(OnlineRLContext):
    visits: dict[int, int] = kept(default_factory=dict)
    novelty: float = renewed(0.0)
    bonus: list[float] | None = produced()


def explore(ctx: CuriousContext) -> None:
    ctx.novelty = 1.0 / (1 + ctx.visits.get(0, 0))
"""

FINE = (
    HEAD
    + """

@middleware(reads=("train_data",))
def learn(ctx: OnlineRLContext) -> Generator[None, None, None]:
    ctx.train_iter += 1
    ctx.log("iter", ctx.train_iter)
    yield
    ctx.task.stop("done")


def count(*, every: int) -> Middleware[Context]:
    def inner(ctx: Context) -> None:
        total: int = ctx.renew().total_step + every

    return inner


class Part:
    roles = (Role.LEARNER,)

    def __call__(self, ctx: OnlineRLContext) -> None: ...


with Task(CuriousContext(novelty=1.0), roles=(Role.LEARNER,), seed=3) as task:
    task.use(explore).use(learn).use(count(every=3)).use(Part(), lock=True)
    task.use(task.serial(explore, task.parallel(learn, task.wrap(explore, lock=True))))
    task.use_wrapper(StepTimer()).use_wrapper(TraceFile("trace.json"))
    task.run(max_step=3)
    bonus: list[float] | None = task.ctx.bonus
    args, kwargs = task.wait_for("event", 3.0)

with Task(seed=3) as online:
    online.use(learn).use(Part())
    steps: int = online.ctx.env_step
"""
)

WRONG = (
    HEAD
    + """

with Task(OnlineRLContext()) as task:
    task.use(explore)
    task.ctx.novelty
    task.ctx.env_step = "many"
    task.ctx.trajectories = "rows"
"""
)


def check(source: str, folder: Path) -> list[str]:
    return [line for line in type_check(source, folder) if line.startswith("error:")]


@pytest.mark.process
def test_a_strict_checker_knows_custom_fields_and_finds_no_error_in_a_correct_program(tmp_path):
    assert check(FINE, tmp_path) == []


@pytest.mark.process
def test_a_strict_checker_finds_wrong_fields_and_wrong_contexts(tmp_path):
    unfit, unknown, mistyped, no_batch = check(WRONG, tmp_path)
    assert "incompatible type" in unfit
    assert 'has no attribute "novelty"' in unknown
    assert "Incompatible types in assignment" in mistyped
    assert 'variable has type "Batch | None"' in no_batch
