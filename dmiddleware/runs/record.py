"""What a run has left in its folder."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import yaml

from dmiddleware.errors import RunFolderError
from dmiddleware.runs.metrics_file import METRICS_FILE, read_metrics
from dmiddleware.runs.statistics import last_tenth

__all__ = [
    "COUNTERS",
    "EVALUATION",
    "PROCESSES",
    "RunRecord",
    "differing_settings",
    "find_runs",
    "flat_settings",
    "is_compared",
    "settings_of",
]

EVALUATION: Final = "eval/return_mean"
"""The metric with the mean return of an evaluation."""

_NOT_COMPARED: Final = ("program", "arguments", "launch", "versions", "git")
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
    """

    path: Path
    settings: Mapping[str, Any]
    rows: Sequence[Mapping[str, Any]]
    axis: str
    at: npt.NDArray[np.int64]
    values: npt.NDArray[np.float64]

    @classmethod
    def load(cls, path: str | Path, metric: str = EVALUATION) -> RunRecord:
        """Read a run's folder.

        Args:
            path: the folder.
            metric: the metric to read; rows without a value for it are left out.

        Raises:
            RunFolderError: if the folder has no metrics, or none of this name.
        """
        path = Path(path)
        rows = read_metrics(path)
        found = [row for row in rows if row.get(metric) is not None]
        if not found:
            names = sorted({name for row in rows for name in row} - {*COUNTERS, "time_s"})
            raise RunFolderError(
                f"{path} has no values of {metric}; it has: {', '.join(names) or 'none'}"
            )
        axis = next(name for name in COUNTERS if name in found[-1])
        return cls(
            path=path,
            settings=settings_of(path),
            rows=rows,
            axis=axis,
            at=np.array([row[axis] for row in found], np.int64),
            values=np.array([row[metric] for row in found], np.float64),
        )

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
        """The name of the environment; empty: ``config.yaml`` does not say it."""
        env = self.settings.get("env")
        return str(env.get("id", "")) if isinstance(env, Mapping) else ""


def find_runs(pattern: str, metric: str = EVALUATION) -> list[RunRecord]:
    """Load all runs in the folders that a pattern matches.

    Args:
        pattern: a folder, or a glob such as ``runs/dqn-*``; a folder is a run itself, or has runs
            anywhere below it.
        metric: the metric to read.

    Raises:
        RunFolderError: if there is no run, or one has no such metric.
    """
    folders = [Path(pattern)] if Path(pattern).is_dir() else sorted(Path().glob(pattern))
    files = sorted({file for one in folders for file in one.rglob(METRICS_FILE)})
    if not files:
        raise RunFolderError(
            f"found no run in {pattern}; a run's folder has the file {METRICS_FILE}"
        )
    return [RunRecord.load(file.parent, metric) for file in files]


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
    found = {}
    for name in names:
        if name.rpartition(".")[2] == "seed" or not is_compared(name):
            continue
        values = [_different(run.get(name) for run in side) for side in flat]
        if len(_different(one for side in values for one in side)) > 1:
            found[name] = values
    return found


def is_compared(name: str) -> bool:
    """Return whether a setting, by its dotted name, shapes a run, so that a difference matters."""
    return name in PROCESSES or name.partition(".")[0] not in _NOT_COMPARED


def _different(values: Iterator[Any]) -> list[Any]:
    found: list[Any] = []
    for value in values:
        if value not in found:
            found.append(value)
    return found


def flat_settings(settings: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each setting with its dotted name; entries of lists are counted from 1.

    An empty list has no entries, so that it equals that of a run which did not record it.
    """
    if isinstance(settings, Mapping):
        for name, value in settings.items():
            yield from flat_settings(value, f"{path}.{name}" if path else str(name))
    elif isinstance(settings, list) and any(isinstance(one, Mapping) for one in settings):
        for number, value in enumerate(settings, 1):
            yield from flat_settings(value, f"{path}.{number}")
    elif settings != []:
        yield path, settings


def settings_of(run: Path) -> dict[str, Any]:
    """Return what the ``config.yaml`` of a run's folder holds; nothing: it is missing.

    Raises:
        RunFolderError: if it is not YAML.
    """
    path = run / "config.yaml"
    try:
        settings = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except yaml.YAMLError as error:
        raise RunFolderError(f"{path} is not YAML: {error}") from error
    return settings if isinstance(settings, dict) else {}
