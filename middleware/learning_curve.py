"""The learning curve: a picture of returns over environment steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from dmiddleware.pipeline import OnlineRLContext, Role, Task
from middleware.run_folder import RunFolder, check_run_folder
from middleware.support import RLContext

__all__ = ["LearningCurve"]

_BINS = 200


class LearningCurve:
    """Draw the learning curve to ``curve.png`` when the task ends, also after an error.

    It shows the mean returns of evaluations, and the returns of the collected episodes as mean,
    lowest and highest in each of up to 200 equal parts of the run.

    The position in the chain does not matter, because it works on the way back. In a run of several
    processes the learner draws it.

    Args:
        run: the folder for the picture.
        title: the title of the picture; None: the folder's name.

    Reads:
        ctx.env_step, or, offline, ctx.train_iter: the horizontal axis.
        ctx.logged, ctx.eval_value: on the way back, if they are set.

    Raises:
        ConfigError: if ``run`` is not a RunFolder.
    """

    roles = (Role.LEARNER,)
    lead_only = True
    reads = ("train_iter",)
    last_step = True

    def __init__(self, run: RunFolder, *, title: str | None = None) -> None:
        self._run = check_run_folder(run, user="LearningCurve")
        self._title = run.name if title is None else title
        self.settings = {"title": title}
        self._axis = "env_step"
        self._training: list[tuple[int, float]] = []
        self._evaluation: list[tuple[int, float]] = []
        self.owns = (run.curve_path,)

    @property
    def evaluations(self) -> list[tuple[int, float]]:
        """For each evaluation so far the env step (offline: the update) and the mean return."""
        return list(self._evaluation)

    def setup(self, task: Task[Any]) -> None:
        """Choose the horizontal axis: environment steps, or updates if there are none.

        Raises:
            RunFolderError: if the folder is in use by another task, or cannot be written to.
        """
        self._run.lock(task)
        if not isinstance(task.ctx, OnlineRLContext):
            self._axis = "train_iter"

    def __call__(self, ctx: RLContext) -> Iterator[None]:
        """Keep the returns of the step, on its way back."""
        yield
        at = getattr(ctx, self._axis)
        training = ctx.logged.get("collect/return_mean")
        if training is not None:
            self._training.append((at, training))
        if ctx.eval_value is not None:
            self._evaluation.append((at, ctx.eval_value))

    def close(self) -> None:
        """Draw the picture, if there are any returns."""
        if self._training or self._evaluation:
            self._draw()

    def state_dict(self) -> dict[str, Any]:
        """Return the returns so far."""
        return {"training": self._training, "evaluation": self._evaluation}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        self._training = [(int(at), float(value)) for at, value in state["training"]]
        self._evaluation = [(int(at), float(value)) for at, value in state["evaluation"]]

    def _draw(self) -> None:
        # Not a pyplot figure, which would change global state and might open a window.
        from matplotlib.figure import Figure  # only the process that draws imports it

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


Floats = npt.NDArray[np.float64]


def _binned(points: Floats) -> tuple[Floats, Floats, Floats, Floats]:
    """Divide the points into parts; return the middle, mean, lowest and highest of each."""
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
