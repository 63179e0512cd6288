"""The plan of a sweep, and what the folders of its runs say about them."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final, Literal, TypeAlias

import msgspec

from dmiddleware.errors import RunFolderError
from dmiddleware.sweep.axes import Axis, Values, folder_name, option_words

__all__ = [
    "PLAN_FILE",
    "TAIL",
    "Search",
    "SweepPlan",
    "SweptRun",
    "held",
    "last_line",
    "read_plan",
    "reason_in",
    "state_of",
    "write_file",
    "write_plan",
]

PLAN_FILE: Final = "sweep.json"
_LOCK_FILE: Final = ".lock"
_ENDED_FILE: Final = "exit_code"
_PRUNED_FILE: Final = "pruned"
_OUTPUT_FILE: Final = "output.txt"
TAIL: Final = 8192
"""Bytes at the end of the output of a run that may say why it failed."""
_FAILED: Final = "the run failed: "

State: TypeAlias = Literal["waiting", "interrupted", "done", "failed", "pruned"]


class Search(msgspec.Struct, frozen=True):
    """How Optuna chooses settings.

    Attributes:
        trials: the number of runs.
        direction: ``"maximize"`` or ``"minimize"`` the score.
        prunes: whether runs that are worse than the median of the others are stopped early.
    """

    trials: int
    direction: Literal["maximize", "minimize"] = "maximize"
    prunes: bool = True


class SweepPlan(msgspec.Struct, frozen=True):
    """What a sweep runs; it does not change once the first run has started.

    Attributes:
        program: the function, ``package.module.function``.
        package: the folder to put first on the import path.
        directory: the working directory of the runs.
        options: options of ``ditask`` for each run.
        arguments: arguments of the program that all runs have.
        axes: what the runs differ in.
        metric: the metric that gives the score.
        stop_s: seconds that a run has to stop in order.
        mark: the mark of the processes of all runs, see :mod:`dmiddleware.launch.leftovers`.
        runs: the values of the runs of a grid, in order.
        search: how Optuna chooses the values instead; None: it does not.
    """

    program: str
    package: str
    directory: str
    options: tuple[str, ...]
    arguments: tuple[str, ...]
    axes: tuple[Axis, ...]
    metric: str
    stop_s: float
    mark: str
    runs: tuple[dict[str, str], ...] = ()
    search: Search | None = None

    def swept(self, folder: Path, values: Values, number: int | None = None) -> SweptRun:
        """Return the run with some values, whose folder's name may begin with a number."""
        name = folder_name(values)
        return SweptRun(
            folder / (name if number is None else f"{number:03}_{name}"),
            tuple(option_words(self.axes, values)),
            {axis.option: values[axis.option] for axis in self.axes},
        )

    def grid_runs(self, folder: Path) -> list[SweptRun]:
        """Return the runs of the grid; folders of the same name get numbers."""
        names = [folder_name(values) for values in self.runs]
        return [
            self.swept(folder, values, number if names.count(name) > 1 else None)
            for number, (name, values) in enumerate(zip(names, self.runs, strict=True))
        ]

    def command(self, run: SweptRun) -> tuple[str, ...]:
        """Return the arguments of ``ditask`` that start a run."""
        options = ("--main", self.program, "--package", self.package, *self.options)
        logs = ("--log-dir", str(run.folder.resolve() / "logs"))
        return (*options, *logs, "--", *self.arguments, *run.words)


class SweptRun(msgspec.Struct, frozen=True):
    """One run of a sweep.

    Attributes:
        folder: its folder.
        words: its arguments for the program, beside those that all runs have.
        values: the values of the options that differ.
    """

    folder: Path
    words: tuple[str, ...]
    values: dict[str, str]

    @property
    def name(self) -> str:
        """The name of its folder."""
        return self.folder.name

    @property
    def output(self) -> Path:
        """The file for what its processes print."""
        return self.folder / _OUTPUT_FILE

    @property
    def ended(self) -> Path:
        """The file that has its exit code."""
        return self.folder / _ENDED_FILE

    @property
    def pruned(self) -> Path:
        """The file that shows that it was stopped early, because other runs are better."""
        return self.folder / _PRUNED_FILE


def state_of(run: SweptRun) -> State:
    """Return what the folder of a run says about it; a run that is running counts as interrupted.

    A process that a signal has ended leaves no exit code, so its run can continue.
    """
    try:
        code = int(run.ended.read_text())
    except (OSError, ValueError):
        code = None
    if code != 0 and run.pruned.exists():
        return "pruned"
    if code is None:
        return "interrupted" if run.folder.is_dir() else "waiting"
    return "failed" if code else "done"


def last_line(run: SweptRun) -> str:
    """Return the last line that a run has printed: of a failed run, its error."""
    try:
        with run.output.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL))
            return reason_in(file.read(TAIL).decode(errors="replace"))
    except OSError:
        return ""


def reason_in(output: str) -> str:
    """Return why a run failed: what ``ditask`` says about it, or the last line."""
    lines = [line.strip().removeprefix("[ditask] ") for line in output.split("\n") if line.strip()]
    reasons = [line for line in lines if line.startswith(_FAILED)] or lines
    return reasons[-1].removeprefix(_FAILED) if reasons else ""


def write_file(path: Path, data: bytes) -> None:
    """Write a file of which, whatever happens, a reader sees nothing or all, on the disk.

    Unlike :func:`dmiddleware.files.atomic_file.write_atomically`, it imports no torch.
    """
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def write_plan(folder: Path, plan: SweepPlan) -> None:
    """Write the plan into the folder of the sweep."""
    write_file(folder / PLAN_FILE, msgspec.json.format(msgspec.json.encode(plan)))


def read_plan(folder: Path) -> SweepPlan:
    """Read the plan of a sweep.

    Raises:
        RunFolderError: if the folder has none.
    """
    try:
        return msgspec.json.decode((folder / PLAN_FILE).read_bytes(), type=SweepPlan)
    except (OSError, msgspec.MsgspecError) as error:
        raise RunFolderError(f"{folder} is not the folder of a sweep: {error}") from error


@contextlib.contextmanager
def held(folder: Path) -> Iterator[None]:
    """Keep other processes from running the same sweep.

    Raises:
        RunFolderError: if one does.
    """
    with (folder / _LOCK_FILE).open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunFolderError(f"{folder}: the sweep is running already") from None
        yield
