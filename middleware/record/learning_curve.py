"""The learning curve: a picture of returns over environment steps."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from dmiddleware.best_effort import BestEffort
from dmiddleware.pipeline import ChainView, Task
from dmiddleware.process.terminal import printable
from dmiddleware.runs.metrics_file import MetricsFile
from dmiddleware.settings import Settings, TakesSettings, takes_options
from middleware.base import BaseMiddleware
from middleware.context import RLContext
from middleware.evaluate import evaluation_prefixes
from middleware.record.log import MetricsLogger
from middleware.record.run_folder import RunFolder, check_run_folder
from middleware.roles import Role
from middleware.support.interval import axis_of

__all__ = ["LearningCurve", "LearningCurveSettings"]

_AXES: Final = (0.12, 0.12, 0.86, 0.8)
"""Left, bottom, width and height, as parts of the figure, with room for labels of any return."""

_BINS: Final = 200


class LearningCurveSettings(Settings):
    """The options of :class:`LearningCurve`."""

    title: str | None = None
    """The title of the picture; None: the folder's name."""


class LearningCurve(BaseMiddleware[RLContext], TakesSettings[LearningCurveSettings]):
    """Draw the learning curve to ``curve.png`` when the task ends, also after an error.

    It shows the mean returns of evaluations, a line for each evaluator, and the returns of the
    collected episodes as mean, lowest and highest in each of up to 200 equal parts of the run.
    Named parts of the chain have lines of their own, over their own counters.
    Returns that are not finite are left out. If the picture cannot be written, a warning says so.

    The evaluations are those in ``metrics.jsonl``, which a :class:`~middleware.MetricsLogger` of
    the same folder writes.

    The position in the chain does not matter, because it works on the way back. In a run of several
    processes the learner draws it; one of a named part draws its own, to ``curve.node-<id>.png``.

    Args:
        run: the folder for the picture.
        settings: the options, each by keyword; see :class:`LearningCurveSettings`.

    Reads:
        ctx.env_step, or, offline, ctx.train_iter: the horizontal axis.
        ctx.logged: on the way back, the returns of collected episodes.

    Raises:
        ConfigError: if ``run`` is not a RunFolder.
    """

    roles = (Role.LEARNER,)
    with_parts = True
    lead_only = True
    reads = ("train_iter",)
    last_step = True

    settings: LearningCurveSettings

    @takes_options(LearningCurveSettings)
    def __init__(self, run: RunFolder, settings: LearningCurveSettings) -> None:
        self._run = check_run_folder(run, user="LearningCurve")
        self._title = run.name if settings.title is None else settings.title
        self.settings = settings
        self._axis = "env_step"
        self._prefixes: tuple[str, ...] = ("eval",)
        self._metrics: MetricsFile | None = None
        self._training = {"": _BinnedReturns()}  # by part; that of the whole chain is empty
        self._best_effort = BestEffort(f"write the learning curve {run.curve_path}", Exception)
        self.owns = (run.curve_path,)

    @property
    def evaluations(self) -> list[tuple[int, float]]:
        """For each evaluation so far the env step (offline: the update) and the mean return."""
        return self._evaluations_of(self._prefixes[0])

    @property
    def other_evaluations(self) -> dict[str, list[tuple[int, float]]]:
        """The same of the evaluators that are not primary, by their names."""
        return {prefix: self._evaluations_of(prefix) for prefix in self._prefixes[1:]}

    def evaluations_of(self, part: str) -> list[tuple[int, float]]:
        """The same of the evaluator of a named part, at the counters of the part."""
        return self._evaluations_of("eval", f"{part}/")

    def _evaluations_of(self, prefix: str, part: str = "") -> list[tuple[int, float]]:
        rows = [] if self._metrics is None else self._metrics.rows()
        name, axis = f"{part}{prefix}/return_mean", part + self._axis
        pairs = [(row.get(axis), row[name]) for row in rows if name in row]
        return [(at, math.nan if value is None else value) for at, value in pairs if at is not None]

    def bind(self, chain: ChainView) -> None:
        """Find the evaluators, whose returns it draws."""
        self._prefixes = evaluation_prefixes(chain.of(None))
        for part in chain.parts:
            self._training.setdefault(part, _BinnedReturns())

    def preflight(self, chain: ChainView) -> Iterable[str]:
        """Reject a chain whose evaluations no logger writes."""
        has_logger = any(isinstance(part, MetricsLogger) for part in chain.middleware)
        if chain.writes("eval_value") and not has_logger:
            yield "it draws the evaluations that a logger writes; add MetricsLogger(run)"

    def setup(self, task: Task[Any]) -> None:
        """Choose the horizontal axis: environment steps, or updates if there are none.

        Raises:
            RunFolderError: if the folder is in use by another task, or cannot be written to.
        """
        self._run.lock(task)
        self._metrics = self._run.metrics
        self._axis = axis_of(task.ctx)

    def __call__(self, ctx: RLContext) -> Iterator[None]:
        """Keep the training returns of the step, on its way back."""
        yield
        for name, curve in self._training.items():
            part = ctx.part(name) if name else ctx
            training = part.logged.get("collect/return_mean")
            if training is not None:
                curve.add(getattr(part, self._axis), training)

    def close(self) -> None:
        """Draw the picture, if there are any returns."""
        evaluations = self.evaluations
        others = {name: curve for name, curve in self.other_evaluations.items() if curve}
        others |= {name: self.evaluations_of(name) for name in self._training if name}
        if any(self._training.values()) or evaluations or any(others.values()):
            with self._best_effort:
                self._draw({self._prefixes[0]: evaluations, **others})

    def state_dict(self) -> dict[str, Any]:
        """Return the training returns in parts; the logger has the position in its file."""
        states = {name: curve.state_dict() for name, curve in self._training.items()}
        whole = {"training": states.pop("")}
        return whole | ({"parts": states} if states else {})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        for name, training in {"": state["training"], **state.get("parts", {})}.items():
            self._training[name].load_state_dict(training)

    def _draw(self, evaluations: Mapping[str, list[tuple[int, float]]]) -> None:
        # Not a pyplot figure, which would change global state and might open a window.
        from matplotlib.figure import Figure  # only the process that draws imports it

        figure = Figure(figsize=(8, 4.5), dpi=110)
        # A layout engine would draw everything twice, to measure it.
        axes = figure.add_axes(_AXES)
        for number, (name, training) in enumerate(self._training.items()):
            if training:
                at, mean, low, high = training.table()
                color = f"C{number}" if name else "tab:blue"
                label = f"training episodes {name}".strip()
                axes.fill_between(at, low, high, color=color, alpha=0.15, linewidth=0)
                axes.plot(at, mean, color=color, linewidth=1, label=label)
        for number, (prefix, points) in enumerate(evaluations.items(), 1):
            if points:
                at, value = np.array(points).T
                name = "" if len(evaluations) == 1 else f" {prefix}"
                label, color = f"evaluation{name}, mean", f"C{number}"
                axes.plot(at, value, "o-", color=color, markersize=4, label=label)
        axes.set_title(printable(self._title))
        axes.set_xlabel("environment steps" if self._axis == "env_step" else "updates")
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


class _BinnedReturns:
    """Mean, lowest and highest of returns, in each of up to 200 equal parts of the steps.

    When there are more parts, two at a time become one. Values that are not finite are left out.
    """

    def __init__(self) -> None:
        self._width = 1
        self._start: int | None = None
        self._parts: list[list[float]] = []  # number, sum of steps, sum, lowest, highest, count

    def __len__(self) -> int:
        return len(self._parts)

    def add(self, at: int, value: float) -> None:
        """Add a value; its step must not be before the step of the last value."""
        if not math.isfinite(value):
            return
        if self._start is None:
            self._start = at
        self._merge([(at - self._start) // self._width, at, value, value, value, 1])
        if len(self._parts) > _BINS:
            self._width *= 2
            parts, self._parts = self._parts, []
            for number, *rest in parts:
                self._merge([number // 2, *rest])

    def table(self) -> npt.NDArray[np.float64]:
        """Return ``[4, n] float64``: mean step, mean, lowest and highest value of each part."""
        _, at, total, low, high, count = np.array(self._parts, dtype=np.float64).T
        return np.stack([at / count, total / count, low, high])

    def state_dict(self) -> dict[str, Any]:
        """Return the parts."""
        return {"width": self._width, "start": self._start, "parts": np.array(self._parts)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        self._width, self._start = state["width"], state["start"]
        self._parts = state["parts"].tolist()

    def _merge(self, part: list[float]) -> None:
        if not self._parts or self._parts[-1][0] < part[0]:
            self._parts.append(part)
            return
        last = self._parts[-1]
        _, at, total, low, high, count = part
        last[1:] = (
            last[1] + at,
            last[2] + total,
            min(last[3], low),
            max(last[4], high),
            last[5] + count,
        )
