"""What a run has left in its folder."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import yaml

from dmiddleware.errors import RunFolderError
from dmiddleware.registry import nearest
from dmiddleware.runs.metrics_file import METRICS_FILE, MetricsRow, read_rows
from dmiddleware.runs.statistics import last_tenth
from dmiddleware.yaml_text import read_yaml

__all__ = [
    "COUNTERS",
    "EVALUATION",
    "PROCESSES",
    "RunRecord",
    "differing_settings",
    "find_runs",
    "flat_settings",
    "is_compared",
    "no_values_of",
    "search_runs",
    "part_of",
    "settings_of",
    "settings_of_part",
]

_log = logging.getLogger(__name__)

EVALUATION: Final = "eval/return_mean"
"""The metric with the mean return of an evaluation."""

_IGNORED_SETTINGS: Final = ("program", "arguments", "launch", "versions", "git")
PROCESSES: Final = ("launch.roles", "launch.parallel_workers")
"""The settings that say which processes a run has."""
COUNTERS: Final = {"env_step": "env steps", "train_iter": "updates"}
"""The counters over which metrics are given, in words."""


@dataclasses.dataclass(frozen=True)
class RunRecord:
    """The settings of a run, and one of its metrics.

    Attributes:
        path: the folder.
        settings: what ``config.yaml`` holds; empty: it is missing.
        rows: all rows of ``metrics.jsonl``.
        axis: the counter over which the metric is given, ``env_step`` or ``train_iter``.
        at: ``[N] int64``, its values.
        values: ``[N] float64``, the metric's; at least one.
        skipped: what was left out of the metrics, because it is damaged; empty: nothing.
    """

    path: Path
    settings: Mapping[str, Any]
    rows: Sequence[Mapping[str, Any]]
    axis: str
    at: npt.NDArray[np.int64]
    values: npt.NDArray[np.float64]
    skipped: str = ""

    @classmethod
    def load(cls, path: str | Path, metric: str = EVALUATION) -> RunRecord:
        """Read a run's folder.

        Args:
            path: the folder.
            metric: the metric to read; rows without a value for it are left out, and so are lines
                that are cut or damaged. That of a named part of the chain,
                ``red/eval/return_mean``, is given over the counters of the part.

        Raises:
            RunFolderError: if the folder has no metrics, or none of this name.
        """
        path = Path(path)
        rows, skipped = read_rows(path / METRICS_FILE)
        rows = [_counted_in(metric.partition("/")[0], row) for row in rows]
        axis, evaluations = _with_values(path, rows, metric, skipped)
        latest: list[MetricsRow] = []
        for row in evaluations:
            # Where a counter goes back, a run began again in the folder of one that was killed.
            while latest and latest[-1][axis] > row[axis]:
                latest.pop()
            latest.append(row)
        if n_left_out := len(evaluations) - len(latest):
            back = f"{path}: left out {n_left_out} evaluations of an earlier attempt"
            skipped = "; ".join(filter(None, [skipped, back]))
        return cls(
            path=path,
            settings=settings_of(path),
            rows=rows,
            axis=axis,
            at=np.array([row[axis] for row in latest], np.int64),
            values=np.array([row[metric] for row in latest], np.float64),
            skipped=skipped,
        )

    @property
    def n_steps(self) -> int:
        """How long the run was: the last value of the counter ``axis``."""
        counts = (row[self.axis] for row in reversed(self.rows) if row.get(self.axis) is not None)
        return max(int(self.at[-1]), int(next(counts, 0)))

    @property
    def interval(self) -> float:
        """The median of the steps between two evaluations; NaN: there is one evaluation."""
        return float(np.median(np.diff(self.at))) if len(self.at) > 1 else np.nan

    @property
    def score(self) -> float:
        """The mean of the last tenth of the values, rounded up to whole values."""
        return last_tenth(self.values)

    @property
    def best(self) -> float:
        """The highest value."""
        return float(self.values.max())

    @property
    def task(self) -> str:
        """The name of the environment or the game; empty: ``config.yaml`` does not say it."""
        env = self.settings.get("env")
        if not isinstance(env, Mapping):
            return ""
        kwargs = env.get("env_kwargs")
        game = kwargs.get("game") if isinstance(kwargs, Mapping) else None
        return str(game or env.get("id", ""))


def find_runs(pattern: str, metric: str = EVALUATION) -> list[RunRecord]:
    """Load all runs in the folders that a pattern matches.

    Runs without a value of the metric are left out with a warning, if others have one.

    Args:
        pattern: a folder, or a glob such as ``runs/dqn-*``; a folder is a run itself, or has runs
            anywhere below it.
        metric: the metric to read.

    Raises:
        RunFolderError: if there is no run, or none has the metric.
    """
    runs, left_out = search_runs(pattern, metric)
    for text in left_out:
        _log.warning("left out: %s", text)
    return runs


def search_runs(pattern: str, metric: str) -> tuple[list[RunRecord], list[str]]:
    """Do as :func:`find_runs`, and return also why runs were left out.

    Raises:
        RunFolderError: if there is no run, or none has the metric.
    """
    if not pattern:
        raise RunFolderError("name runs: a folder, such as runs/dqn, or a glob, such as 'runs/*'")
    folder = Path(pattern)
    root = Path(folder.anchor)
    folders = [folder] if folder.is_dir() else root.glob(str(folder.relative_to(root)))
    files = sorted({file for path in folders for file in path.rglob(METRICS_FILE)})
    if not files:
        near = nearest(
            folder.name, [path.name for path in folder.parent.glob("*") if path.is_dir()]
        )
        hint = f"did you mean {' or '.join(str(folder.parent / path) for path in near)}? " * bool(
            near
        )
        raise RunFolderError(
            f"found no run in {pattern}; {hint}a run's folder has the file {METRICS_FILE}"
        )
    runs: list[RunRecord] = []
    left_out: list[_NoValues] = []
    for file in files:
        try:
            runs.append(RunRecord.load(file.parent, metric))
        except _NoValues as error:
            left_out.append(error)
    if not runs:
        raise left_out[0]
    return runs, list(map(str, left_out))


def _counted_in(part: str, row: MetricsRow) -> MetricsRow:
    """Return a row with the counters of a part of the chain, if there is one of this name."""
    counters = {name: row[f"{part}/{name}"] for name in COUNTERS if f"{part}/{name}" in row}
    return {**row, **counters} if counters else row


class _NoValues(RunFolderError):
    """A run has no values of the metric."""


def _with_values(
    path: Path, rows: Sequence[MetricsRow], metric: str, skipped: str
) -> tuple[str, list[MetricsRow]]:
    """Return the counter over which a metric is given, and the rows that have both."""
    with_value = [row for row in rows if row.get(metric) is not None]
    if not with_value:
        names = {name for row in rows for name, value in row.items() if value is not None}
        raise _NoValues(
            f"{path} has {no_values_of(metric, names)}" + (f" ({skipped})" if skipped else "")
        )
    for axis in COUNTERS:
        if counted := [row for row in with_value if row.get(axis) is not None]:
            return axis, counted
    raise _NoValues(f"{path}: no row with {metric} has {' or '.join(COUNTERS)}")


def no_values_of(metric: str, names: Iterable[str]) -> str:
    """Return the end of a message about a run without a metric, with those that it has."""
    metrics = sorted(set(names) - {*COUNTERS, "time_s"})
    near = nearest(metric, metrics)
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    return f"no values of {metric}; {hint}it has: {', '.join(metrics) or 'none'}"


def differing_settings(sides: Sequence[Sequence[RunRecord]]) -> dict[str, list[list[Any]]]:
    """Return the settings in which the runs differ, except for seeds.

    What the program was called with is not compared, because the settings that it led to are, and
    neither are the code that ran and how processes were connected.

    Args:
        sides: the runs of each side.

    Returns:
        By the dotted name of a setting, the different values of each side, in order; a run without
        the setting adds None.
    """
    flat = [[dict(flat_settings(run.settings)) for run in side] for side in sides]
    names = dict.fromkeys(name for side in flat for run in side for name in run)
    differing = {}
    for name in names:
        if name.rpartition(".")[2] == "seed" or not is_compared(name):
            continue
        values = [_different(run.get(name) for run in side) for side in flat]
        if len(_different(value for side in values for value in side)) > 1:
            differing[name] = values
    return differing


def is_compared(name: str) -> bool:
    """Return whether a setting, by its dotted name, shapes a run, so that a difference matters."""
    return name in PROCESSES or name.partition(".")[0] not in _IGNORED_SETTINGS


def _different(values: Iterator[Any]) -> list[Any]:
    distinct: list[Any] = []
    for value in values:
        if value not in distinct:
            distinct.append(value)
    return distinct


def flat_settings(settings: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each setting with its dotted name; entries of lists are counted from 1.

    An empty list has no entries, so that it equals that of a run which did not record it.
    """
    if isinstance(settings, Mapping):
        for name, value in settings.items():
            yield from flat_settings(value, f"{path}.{name}" if path else str(name))
    elif isinstance(settings, list) and any(isinstance(item, Mapping) for item in settings):
        for number, value in enumerate(settings, 1):
            yield from flat_settings(value, f"{path}.{number}")
    elif settings != []:
        yield path, settings


def part_of(path: Path) -> str | None:
    """Return the part of the chain that a checkpoint belongs to: ``red`` for ``ckpt/red/best.…``.

    Args:
        path: the checkpoint, or the folder of a run, which belongs to none.
    """
    folder = path.resolve().parent
    return folder.name if path.is_file() and folder.parent.name == "ckpt" else None


def settings_of_part(run: Path, part: str | None) -> dict[str, Any]:
    """Return what ``config.yaml`` would hold of a run that had learned this part's policy only."""
    settings = settings_of(run)
    if part is None:
        return settings
    envs, policies = (settings.get(name) or {} for name in ("envs", "policy"))
    return {**settings, **envs.get(part, {}), "policy": policies.get(part)}


def settings_of(run: Path) -> dict[str, Any]:
    """Return what the ``config.yaml`` of a run's folder holds; nothing: it is missing.

    Raises:
        RunFolderError: if it is not YAML.
    """
    path = run / "config.yaml"
    try:
        settings = read_yaml(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise RunFolderError(f"{path} is not YAML: {error}") from error
    return settings if isinstance(settings, dict) else {}
