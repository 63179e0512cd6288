"""The learning curve: a picture of returns over environment steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from dmiddleware.best_effort import BestEffort
from dmiddleware.pipeline import Task
from dmiddleware.settings import Settings, takes_settings
from middleware.base import BaseMiddleware
from middleware.context import OnlineRLContext, RLContext
from middleware.roles import Role
from middleware.run_folder import RunFolder, check_run_folder
from middleware.support.checks import as_float
from middleware.support.history import BinnedHistory, History

__all__ = ["LearningCurve", "LearningCurveSettings"]


class LearningCurveSettings(Settings):
    """The options of :class:`LearningCurve`."""

    title: str | None = None
    """The title of the picture; None: the folder's name."""


class LearningCurve(BaseMiddleware[RLContext]):
    """Draw the learning curve to ``curve.png`` when the task ends, also after an error.

    It shows the mean returns of evaluations, and the returns of the collected episodes as mean,
    lowest and highest in each of up to 200 equal parts of the run. Returns that are not finite are
    left out. If the picture cannot be written, a warning says so.

    Its state does not grow with the run: the evaluations so far are in the run's folder, in
    ``evaluations.jsonl``, which is written when the state is saved.

    The position in the chain does not matter, because it works on the way back. In a run of several
    processes the learner draws it.

    Args:
        run: the folder for the picture.

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

    settings: LearningCurveSettings

    @takes_settings(LearningCurveSettings)
    def __init__(self, run: RunFolder, settings: LearningCurveSettings) -> None:
        self._run = check_run_folder(run, user="LearningCurve")
        self._title = run.name if settings.title is None else settings.title
        self.settings = settings
        self._training = BinnedHistory()
        self._evaluation = History(run.path / "evaluations.jsonl", axis="env_step")
        self._best_effort = BestEffort(f"write the learning curve {run.curve_path}", Exception)
        self.owns = (run.curve_path,)

    @property
    def evaluations(self) -> list[tuple[int, float]]:
        """For each evaluation so far the env step (offline: the update) and the mean return."""
        return list(self._evaluation.rows)

    def setup(self, task: Task[Any]) -> None:
        """Choose the horizontal axis: environment steps, or updates if there are none.

        Raises:
            RunFolderError: if the folder is in use by another task, or cannot be written to.
        """
        self._run.lock(task)
        if not isinstance(task.ctx, OnlineRLContext):
            self._evaluation.axis = "train_iter"

    def __call__(self, ctx: RLContext) -> Iterator[None]:
        """Keep the returns of the step, on its way back."""
        yield
        at = getattr(ctx, self._evaluation.axis)
        training = ctx.logged.get("collect/return_mean")
        if training is not None:
            self._training.add(at, training)
        if ctx.eval_value is not None:
            self._evaluation.add(at, as_float(ctx.eval_value))

    def close(self) -> None:
        """Draw the picture, if there are any returns."""
        if self._training or self._evaluation.rows:
            with self._best_effort:
                self._draw()

    def state_dict(self) -> dict[str, Any]:
        """Return the training returns in parts, and where the evaluations are."""
        return {
            "training": self._training.state_dict(),
            "evaluation": self._evaluation.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        self._training.load_state_dict(state["training"])
        self._evaluation.load_state_dict(state["evaluation"])

    def _draw(self) -> None:
        # Not a pyplot figure, which would change global state and might open a window.
        from matplotlib.figure import Figure  # only the process that draws imports it

        figure = Figure(figsize=(8, 4.5), dpi=110, layout="constrained")
        axes = figure.add_subplot()
        if self._training:
            at, mean, low, high = self._training.table()
            axes.fill_between(at, low, high, color="tab:blue", alpha=0.15, linewidth=0)
            axes.plot(at, mean, color="tab:blue", linewidth=1, label="training episodes")
        if self._evaluation.rows:
            at, value = np.array(self._evaluation.rows, dtype=np.float64).T
            value[~np.isfinite(value)] = np.nan
            axes.plot(at, value, "o-", color="tab:orange", markersize=4, label="evaluation, mean")
        axes.set_title(self._title)
        axes.set_xlabel("environment steps" if self._evaluation.axis == "env_step" else "updates")
        axes.set_ylabel("return")
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.grid(alpha=0.3)
        axes.legend(loc="best")
        path = self._run.curve_path
        partial = path.with_suffix(".partial.png")
        try:
            figure.savefig(partial)
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)
