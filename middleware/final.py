"""What is left of a run's context when it ends."""

from __future__ import annotations

import json
import math
from typing import Any

from dmiddleware.pipeline import Context, Middleware, Role, Task
from middleware.run_folder import RunFolder

__all__ = ["final_ctx_saver"]


class _FinalCtxSaver:
    """Saves the context's lasting fields; see :func:`final_ctx_saver`."""

    __name__ = "final_ctx_saver"
    roles = (Role.LEARNER,)

    def __init__(self, run: RunFolder) -> None:
        self._run = run
        self._task: Task[Any] | None = None

    def setup(self, task: Task[Any]) -> None:
        self._task = task

    def __call__(self, ctx: Context) -> None:
        """Do nothing: all is done at the end."""

    def close(self) -> None:
        if self._task is None:
            return
        task, self._task = self._task, None
        fields = {
            name: _finite(value)
            for name, value in task.ctx.state_dict()["values"].items()
            if isinstance(value, bool | int | float | str | None)
        }
        path = self._run.path / "final_ctx.json"
        partial = path.with_suffix(".json.partial")
        text = json.dumps({**fields, "stop_reason": task.stop_reason}, indent=2)
        partial.write_text(text + "\n", encoding="utf-8")
        partial.replace(path)


def final_ctx_saver(run: RunFolder) -> Middleware[Any]:
    """Write ``final_ctx.json`` to the run's folder when the task ends, also after an error.

    It holds the fields of the context that carry over from step to step (as far as they are
    numbers, strings, booleans or None; infinite numbers become null), and ``stop_reason``. Of
    several processes the learner writes it.

    Args:
        run: the folder.
    """
    return _FinalCtxSaver(run)


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
