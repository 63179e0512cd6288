"""The learning curve: a picture of returns over environment steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib.figure import Figure

from dmiddleware.pipeline import Middleware, OnlineRLContext, Role, Task
from middleware.run_folder import RunFolder

__all__ = ["learning_curve"]

_BINS = 200


class _LearningCurve:
    """Gathers returns and draws them at the end; see :func:`learning_curve`."""

    __name__ = "learning_curve"
    roles = (Role.LEARNER,)
    last_step = True

    def __init__(self, run: RunFolder, *, title: str | None) -> None:
        self._run = run
        self._title = run.name if title is None else title
        self._axis = "env_step"
        self._training: list[tuple[int, float]] = []
        self._evaluation: list[tuple[int, float]] = []

    def setup(self, task: Task[Any]) -> None:
        if not isinstance(task.ctx, OnlineRLContext):
            self._axis = "train_iter"

    def __call__(self, ctx: Any) -> Iterator[None]:
        yield
        at = getattr(ctx, self._axis)
        training = ctx.logged.get("collect/return_mean")
        if training is not None:
            self._training.append((at, training))
        if ctx.eval_value is not None:
            self._evaluation.append((at, ctx.eval_value))

    def close(self) -> None:
        if self._training or self._evaluation:
            self._draw()

    def state_dict(self) -> dict[str, Any]:
        return {"training": self._training, "evaluation": self._evaluation}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._training = [(int(at), float(value)) for at, value in state["training"]]
        self._evaluation = [(int(at), float(value)) for at, value in state["evaluation"]]

    def _draw(self) -> None:
        # A figure of its own, not pyplot's: nothing global is touched, no window can open.
        figure = Figure(figsize=(8, 4.5), dpi=110, layout="constrained")
        axes = figure.add_subplot()
        if self._training:
            at, mean, low, high = _binned(np.array(self._training, dtype=np.float64))
            axes.fill_between(at, low, high, color="tab:blue", alpha=0.15, linewidth=0)
            axes.plot(at, mean, color="tab:blue", linewidth=1, label="training episodes")
        if self._evaluation:
            at, value = np.array(self._evaluation, dtype=np.float64).T
            axes.plot(at, value, "o-", color="tab:orange", markersize=4, label="evaluation, mean")
        axes.set_title(self._title)
        axes.set_xlabel("environment steps" if self._axis == "env_step" else "updates")
        axes.set_ylabel("return")
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.grid(alpha=0.3)
        axes.legend(loc="best")
        path = self._run.curve_path
        partial = path.with_suffix(".partial.png")
        figure.savefig(partial)
        partial.replace(path)


def learning_curve(run: RunFolder, *, title: str | None = None) -> Middleware[Any]:
    """Draw the learning curve into ``curve.png`` when the task ends, also after an error.

    It shows the mean returns of evaluations, and of the episodes that were collected (their mean,
    and the span from the lowest to the highest, over a hundred or two equal parts of the run).

    Its place in the chain does not matter, as it works on the way back. Of several processes the
    learner draws it.

    Args:
        run: the folder for the picture.
        title: stands above the picture; None: the folder's name.

    Reads:
        ctx.env_step, or, offline, ctx.train_iter: the horizontal axis.
        ctx.logged, ctx.eval_value: on the way back, if they are there.
    """
    return _LearningCurve(run, title=title)


Floats = npt.NDArray[np.float64]


def _binned(points: Floats) -> tuple[Floats, Floats, Floats, Floats]:
    """Cut the horizontal axis into parts; return the middle, mean, least and greatest of each."""
    at, value = points.T
    width = max((at[-1] - at[0]) / _BINS, 1.0)
    part = ((at - at[0]) / width).astype(np.int64)
    _, start = np.unique(part, return_index=True)
    count = np.diff(np.append(start, len(at)))
    return (
        np.add.reduceat(at, start) / count,
        np.add.reduceat(value, start) / count,
        np.minimum.reduceat(value, start),
        np.maximum.reduceat(value, start),
    )
