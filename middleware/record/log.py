"""Logging: write what a run measures to tensorboard and the text log."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import numpy as np
import torch

from dmiddleware.best_effort import BestEffort
from dmiddleware.metric_names import as_metric_name
from dmiddleware.pipeline import ChainView, Clock, SystemClock, Task
from dmiddleware.policy import UpdateOutput
from dmiddleware.runs.statistics import short
from dmiddleware.settings import Count, TakesSettings, takes_options
from dmiddleware.tensorboard import add_gif, encode_video
from dmiddleware.tree import as_number, to_float
from middleware.base import BaseMiddleware
from middleware.context import RLContext
from middleware.evaluate import evaluation_prefixes
from middleware.metrics import COUNTS, TOTALS
from middleware.record.run_folder import RunFolder, check_run_folder
from middleware.support.interval import Interval, IntervalSettings, axis_of

__all__ = [
    "MetricsLogger",
    "MetricsLoggerSettings",
]

_EVALUATION_METRICS: Final = (
    "return_mean", "return_std", "return_min", "return_max", "length_mean", "success_rate",
)  # fmt: skip
_FPS = 20  # frames per second of videos of evaluations

_log = logging.getLogger(__name__)


class MetricsLoggerSettings(IntervalSettings):
    """The options of :class:`MetricsLogger`."""

    every_train_iter: Count | None = None
    """Updates from one write to the next; offline, without an interval: 100."""
    every_env_step: Count | None = None
    """Env steps from one write to the next; without an interval: 1000."""


class MetricsLogger(BaseMiddleware[RLContext], TakesSettings[MetricsLoggerSettings]):
    """Write metrics to TensorBoard, the metrics file and the text log.

    These are everything that a middleware logged with ``ctx.log``, the scalars that learning
    reported (``learn/…``; a key that begins with ``[scalars]`` or ``[histogram]`` is written as
    such), evaluations (``eval/return_mean`` and so on, or the name of the evaluator in place of
    ``eval``, and videos), and throughput (``speed/…``).
    Each value is a mean since the last write, or the total over the run where it is one
    (:data:`~middleware.metrics.COUNTS`, :data:`~middleware.metrics.TOTALS`); evaluations are
    written at once. TensorBoard draws them over env steps, or over updates if the context has no
    env steps.

    Each write adds a line to ``metrics.jsonl``, with the counters and the seconds since the start
    of the run (``time_s``). The lines survive if the process is killed, and a resumed run continues
    the file. In a run of several processes, TensorBoard also gets the router's totals by event
    (``router/event/…``) and by peer (``router/node…``).

    The metrics of a named part of the chain begin with its name (``red/learn/…``,
    ``red/eval/…``). Each line also has its counters (``red/env_step``, ``red/train_iter``), over
    which TensorBoard draws them; those without a name are the sums over all parts.

    The position in the chain does not matter, because it works on the way back. In a run of several
    processes each one writes its metrics to a separate folder. A folder has one logger: with an
    :class:`~middleware.Experiment`, which has its own, give the interval to that.

    Args:
        run: the folder to write to.
        settings: the options, each by keyword; see :class:`MetricsLoggerSettings`.

    Reads:
        ctx.env_step, ctx.train_iter: counters.
        ctx.logged, ctx.train_output, ctx.eval_value, ctx.eval_output, ctx.other_evaluations: on the
            way back, if they are set.

    Raises:
        ConfigError: if ``run`` is not a RunFolder, or an option is not valid.
    """

    last_step = True
    lead_only = True
    reads = ("train_iter",)

    settings: MetricsLoggerSettings

    @takes_options(MetricsLoggerSettings)
    def __init__(self, run: RunFolder, settings: MetricsLoggerSettings) -> None:
        self._run = check_run_folder(run, user="MetricsLogger")
        self.owns = (run.metrics_path,)
        self.settings = settings
        self._interval = Interval(settings, online=1000, offline=100)
        self._axis = "env_step"
        self._prefixes: tuple[str, ...] = ("eval",)
        self._clock: Clock = SystemClock()
        self._sums: dict[str, list[float]] = {}
        self._totals: dict[str, float] = {}
        self._resumed: dict[str, float] = {}  # totals of the snapshot, until they are logged again
        self._offsets: dict[str, float] = {}  # of those that began again from zero
        self._has_new_totals = False
        self._spelled: dict[str, str] = {}  # the names so far, by themselves in lower case
        self._warned: set[str] = set()
        self._others: dict[str, Any] = {}
        self._unread: list[tuple[str, UpdateOutput]] = []
        self._on_device: list[tuple[str, torch.Tensor]] = []  # scalars that nobody has read
        self._at: dict[str, int] = {}  # the counters now
        self._parts: tuple[str, ...] = ()  # what the metrics of parts begin with
        self._before: dict[str, int] = {}  # those of the last write, and when it was
        self._written_at = 0.0
        self._started: float | None = None
        self._videos = BestEffort(f"write videos to {run.path}", Exception)
        self._earlier_s = 0.0

    def bind(self, chain: ChainView) -> None:
        """Find the evaluators."""
        self._prefixes = evaluation_prefixes(chain.of(None))
        self._parts = tuple(f"{name}/" for name in chain.parts)

    def preflight(self, chain: ChainView) -> Iterable[str]:
        """Refuse an interval in a counter that the chain does not have."""
        yield from self._interval.preflight(chain)

    def setup(self, task: Task[Any]) -> None:
        """Start to measure throughput.

        Raises:
            RunFolderError: if the folder is in use by another task, or cannot be written to.
        """
        self._run.lock(task)
        self._clock = task.clock
        self._started = self._written_at = task.clock.now()
        self._axis = axis_of(task.ctx)
        self._at = self._before = self._counts(task.ctx)
        self._interval.start(task.ctx)

    def __call__(self, ctx: RLContext) -> Iterator[None]:
        """Collect the metrics of the step on its way back; write them at intervals."""
        yield
        for name, value in ctx.logged.items():
            self._note_logged(name, value)
        self._at = self._counts(ctx)
        for prefix in self._parts:
            self._at |= self._counts(ctx.part(prefix[:-1]), prefix)
        self._note_learning(ctx)
        for prefix in self._parts:
            self._note_learning(ctx.part(prefix[:-1]), prefix)
        if self._interval.is_due(ctx):
            self._log_rates(ctx)
            self._flush()

    def _note_learning(self, ctx: RLContext, part: str = "") -> None:
        """Note the outputs of the learner of a part, and write the evaluations.

        Args:
            ctx: the context of the part.
            part: what its metrics begin with; empty: it is the whole chain.
        """
        output = ctx.train_output
        if output is not None:
            for item in output if isinstance(output, list) else [output]:
                if isinstance(item, UpdateOutput):
                    # Reading it waits for the GPU.
                    self._unread.append((part, item))
                else:
                    self._add_output(item, part)
        if ctx.eval_value is not None:
            output = ctx.eval_output if isinstance(ctx.eval_output, Mapping) else {}
            of_primary = {**output, "return_mean": ctx.eval_value}
            prefix = f"{part}eval" if part else self._prefixes[0]
            self._write_evaluation(prefix, of_primary, ctx.train_iter, part)
        for prefix, output in ctx.other_evaluations.items():
            self._write_evaluation(f"{part}{prefix}", output, ctx.train_iter, part)

    def _part_of(self, name: str) -> str:
        """Return what the metrics of the part begin with that a metric belongs to."""
        return next((part for part in self._parts if name.startswith(part)), "")

    def _note_logged(self, name: str, value: Any) -> None:
        kind = name.removeprefix(self._part_of(name)) if self._parts else name
        if isinstance(value, torch.Tensor):
            self._on_device.append((name, value))
        elif kind in COUNTS:
            self._set_total(name, self._totals.get(name, 0.0) + value)
        elif kind in TOTALS:
            self._set_total(name, self._offset(name, value) + value)
        else:
            self._add(name, value)

    def close(self) -> None:
        """Write the metrics since the last write."""
        if self._sums or self._unread or self._on_device or self._has_new_totals:
            self._flush()

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the metrics file, and what the next write will be made of."""
        self._read_outputs()
        return {
            "time_s": self._time_s,
            "metrics": self._run.metrics.state_dict(),
            "interval": self._interval.state_dict(),
            "totals": dict(self._totals),
            "sums": {name: list(entry) for name, entry in self._sums.items()},
            "others": {key: _as_plain(value) for key, value in self._others.items()},
            "before": dict(self._before),
            "elapsed_s": self._clock.now() - self._written_at,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned; metrics behind the position are dropped."""
        self._earlier_s = state["time_s"]
        self._run.metrics.load_state_dict(state["metrics"])
        self._interval.load_state_dict(state["interval"])
        self._unread.clear()
        self._on_device.clear()
        self._sums = {name: list(entry) for name, entry in state.get("sums", {}).items()}
        self._others = dict(state.get("others", {}))
        self._totals = dict(state.get("totals", {}))
        self._resumed = {
            name: total
            for name, total in self._totals.items()
            if name.removeprefix(self._part_of(name)) in TOTALS
        }
        self._offsets.clear()
        if "before" in state:
            self._before = dict(state["before"])
            self._written_at = self._clock.now() - state["elapsed_s"]

    @property
    def _time_s(self) -> float:
        now = self._clock.now()
        return self._earlier_s + now - (now if self._started is None else self._started)

    def _counts(self, ctx: RLContext, part: str = "") -> dict[str, int]:
        names = dict.fromkeys((self._axis, "train_iter"))
        return {f"{part}{name}": getattr(ctx, name) for name in names}

    def _write_row(self, metrics: Mapping[str, float]) -> None:
        time_s = round(self._time_s, 3)
        self._run.metrics.append({**self._at, "time_s": time_s, **metrics})

    def _add(self, name: str, value: float) -> None:
        entry = self._sums.get(name)
        if entry is None:
            self._note(name)
            self._sums[name] = [value, 1]
        else:
            entry[0] += value
            entry[1] += 1

    def _set_total(self, name: str, total: float) -> None:
        self._totals[name] = total
        self._has_new_totals = True

    def _offset(self, name: str, value: float) -> float:
        """Return what to add to a total, whose owner may have begun from zero at a resume."""
        if name in self._resumed:
            before = self._resumed.pop(name)
            # An owner that has a state logs more than before the snapshot.
            self._offsets[name] = before if value <= before else 0.0
        return self._offsets.get(name, 0.0)

    def _note(self, name: str) -> None:
        """Warn of names that a file system or a tracker may not distinguish."""
        spelled = self._spelled.setdefault(name.casefold(), name)
        if spelled != name and name not in self._warned:
            self._warned.add(name)
            _log.warning(
                "the metrics %s and %s differ only by upper and lower case, which not every "
                "program keeps apart; rename one of them",
                spelled,
                name,
            )

    def _add_output(self, output: Mapping[str, Any], part: str) -> None:
        for key, value in output.items():
            number = as_number(value)
            if number is not None:
                self._add(as_metric_name(f"{part}learn/{key}"), number)
            elif isinstance(key, str) and key.startswith("["):
                self._others[part + key] = value

    def _write_evaluation(
        self, prefix: str, output: Mapping[str, Any], train_iter: int, part: str
    ) -> None:
        writer, at = self._run.tb_logger, self._at[part + self._axis]
        values = {
            f"{prefix}/{name}": to_float(output[name])
            for name in _EVALUATION_METRICS
            if name in output
        }
        if "video" in output:
            with self._videos:
                gif = encode_video(output["video"], fps=_FPS)
                add_gif(writer, f"{prefix}/video", gif, at)
                path = self._run.video_path(self._at[self._axis], prefix)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(gif)
        for name, value in values.items():
            writer.add_scalar(name, value, at)
        self._write_row(values)
        _log.info(
            "%s %d, update %d: mean return %.2f in the evaluation%s",
            self._axis,
            at,
            train_iter,
            values[f"{prefix}/return_mean"],
            "" if prefix == self._prefixes[0] else f" {prefix}",
        )

    def _log_rates(self, ctx: RLContext) -> None:
        now = self._clock.now()
        elapsed = now - self._written_at
        if elapsed > 0:
            for name in dict.fromkeys((self._axis, "train_iter")):
                count = self._at[name] - self._before[name]
                self._add(f"speed/{name}_per_s", count / elapsed)
        if ctx.task.router is not None:
            # There are too many totals for the text log.
            for name, total in ctx.task.router.counters().items():
                self._run.tb_logger.add_scalar(f"router/{name}", total, self._at[self._axis])
        self._written_at, self._before = now, self._at

    def _read_outputs(self) -> None:
        unread, self._unread = self._unread, []
        for part, output in unread:
            self._add_output(output, part)
        if self._on_device:
            names, scalars = zip(*self._on_device, strict=True)
            self._on_device = []
            numbers = torch.stack([scalar.detach().double() for scalar in scalars]).tolist()
            for name, number in zip(names, numbers, strict=True):
                if not math.isnan(number):
                    self._add(name, number)

    def _flush(self) -> None:
        self._read_outputs()
        writer = self._run.tb_logger
        means = {name: total / count for name, (total, count) in self._sums.items()}
        written = dict(sorted((means | self._totals).items()))
        self._write_row(written)
        for name, value in written.items():
            writer.add_scalar(name, value, self._at[self._part_of(name) + self._axis])
        for key, value in self._others.items():
            head, _, name = key.partition("]")
            part, _, kind = head.rpartition("[")
            at = self._at[part + self._axis]
            if kind == "histogram":
                finite = _finite(value)
                if len(finite):
                    writer.add_histogram(f"{part}learn/{name}", finite, at)
            elif kind == "scalars":
                writer.add_scalars(f"{part}learn/{name}", value, at)
        writer.flush()
        text = ", ".join(f"{name} {short(value)}" for name, value in written.items())
        _log.info("%s %d: %s", self._axis, self._at[self._axis], text)
        self._sums.clear()
        self._others.clear()
        self._has_new_totals = False


def _as_plain(value: Any) -> Any:
    """Return a histogram, or the numbers of one plot by name, as a snapshot can save it."""
    if isinstance(value, Mapping):
        return {str(name): to_float(number) for name, number in value.items()}
    return _finite(value)


def _finite(values: Any) -> Any:
    """Return the finite values of a histogram, which has no place for other values."""
    if isinstance(values, torch.Tensor):
        values = values.detach().cpu().float().numpy()
    array = np.asarray(values, dtype=np.float64).reshape(-1)
    return array[np.isfinite(array)]
