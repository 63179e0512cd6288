"""Run one program of DI-engine behind the door for a short budget, and say what it did.

``python -m tests.di_engine.watched FILE CHECKOUT SECONDS SEED`` writes one line of JSON at the end.
"""

from __future__ import annotations

import json
import runpy
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

import dmiddleware.ding  # noqa: F401 (opens the door)
from dmiddleware.ding import config
from dmiddleware.ding.envs.adapter import AsGymnasium
from dmiddleware.ding.framework.global_task import ProgramTask
from middleware.base import BaseMiddleware
from middleware.context import RLContext

MARK = "DI-ENGINE-PROGRAM "


class _Watch(BaseMiddleware[RLContext]):
    """Notes what the run does, and ends it when the budget is spent."""

    def __init__(self, task: ProgramTask, seconds: float, seen: dict[str, Any]) -> None:
        self._task, self._deadline, self._seen = task, time.monotonic() + seconds, seen

    def __call__(self, ctx: RLContext) -> Iterator[None]:
        yield
        if ctx.eval_value is not None:
            self._seen["evaluations"].append(round(float(ctx.eval_value), 3))
        self._seen.update(env_step=getattr(ctx, "env_step", 0), train_iter=ctx.train_iter)
        if time.monotonic() > self._deadline:
            self._task.stop("the budget is spent", ok=True)


def main(file: str, checkout: str, seconds: float, seed: int) -> None:
    """Run a program, each of its tasks for so many seconds at most."""
    seen: dict[str, Any] = {"evaluations": [], "env_step": 0, "train_iter": 0}
    run, compile_config = ProgramTask.run, config.compile_config

    def watched(task: ProgramTask, max_step: int | None = None) -> None:
        task.use(_Watch(task, seconds, seen))
        run(task, max_step)
        seen["stopped"] = task.stop_reason

    step = AsGymnasium.step

    def stepped(env: AsGymnasium, action: Any) -> Any:
        values = np.asarray(action)
        if values.dtype.kind == "f":
            low, high = seen.get("actions", (0.0, 0.0))
            seen["actions"] = min(low, float(values.min())), max(high, float(values.max()))
        return step(env, action)

    def compiled(*arguments: Any, **options: Any) -> Any:
        return compile_config(*arguments, **{**options, "seed": seed})

    ProgramTask.run = watched  # type: ignore[method-assign]
    config.compile_config = compiled
    AsGymnasium.step = stepped  # type: ignore[method-assign]
    sys.path.insert(0, checkout)
    sys.argv = [file]
    runpy.run_path(file, run_name="__main__")
    print(MARK + json.dumps(seen), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], float(sys.argv[3]), int(sys.argv[4]))
