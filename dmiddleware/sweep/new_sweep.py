"""Making the plan of a new sweep, with names and values that its program accepts."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from dmiddleware.command_line import check_arguments, offered_options
from dmiddleware.errors import ConfigError, RunFolderError
from dmiddleware.launch.cli import ditask
from dmiddleware.launch.leftovers import new_mark
from dmiddleware.launch.main_function import import_main, reads_arguments
from dmiddleware.launch.options import LaunchOptions
from dmiddleware.sweep.axes import Axis, grid, option_words, read_axes
from dmiddleware.sweep.sweep_plan import PLAN_FILE, Search, SweepPlan, write_plan

__all__ = ["SweepOrder", "free_folder", "make_sweep"]

_ROOT: Final = Path("sweeps")
_STOP_S: Final = 10.0


@dataclass(frozen=True)
class SweepOrder:
    """What a sweep was asked for.

    Attributes:
        program: the function, ``package.module.function``.
        settings: texts such as ``learning_rate=1e-4,3e-4``.
        package: the folder to put first on the import path.
        options: options of ``ditask`` for each run.
        arguments: arguments of the program that all runs have.
        metric: the metric that gives the score.
        search: how Optuna chooses values; None: all combinations are run.
        name: for its folder; empty: the module of the program.
    """

    program: str
    settings: Sequence[str]
    package: Path
    metric: str
    options: Sequence[str] = ()
    arguments: Sequence[str] = ()
    search: Search | None = None
    name: str = ""


def make_sweep(order: SweepOrder, folder: Path) -> SweepPlan:
    """Check what was asked for, make the folder, and write the plan into it.

    Raises:
        ConfigError: for settings or values that the program does not take.
        LaunchError: for wrong options of ``ditask``, or a program that cannot be imported.
        RunFolderError: if the folder holds something.
    """
    options = _launch_options(order)
    main = _imported(order)
    offered = offered_options(main, order.arguments)
    axes = read_axes(order.settings, offered.flags)
    if order.search is not None and any(axis.option == "seed" for axis in axes):
        raise ConfigError(
            "--set seed: a sampler would look for the best seed; give one after --, such as: "
            "-- --seed 3"
        )
    runs = grid(axes) if order.search is None else []
    for words in _word_lists(axes, offered.choosing):
        check_arguments(main, [*order.arguments, *words])
    if folder.is_dir() and any(folder.iterdir()):
        has_plan = (folder / PLAN_FILE).exists()
        hint = f"ditask sweep --resume {folder}" if has_plan else "--output with another folder"
        raise RunFolderError(f"{folder} exists and is not empty; use {hint}")
    folder.mkdir(parents=True, exist_ok=True)
    plan = SweepPlan(
        program=order.program,
        package=str(order.package.resolve()),
        directory=str(Path.cwd()),
        options=tuple(order.options),
        arguments=tuple(order.arguments),
        axes=tuple(axes),
        metric=order.metric,
        stop_s=options.kill_after + _STOP_S,
        mark=new_mark(),
        runs=tuple(map(dict, runs)),
        search=order.search,
    )
    write_plan(folder, plan)
    return plan


def free_folder(order: SweepOrder) -> Path:
    """Return a folder in ``sweeps/`` that does not exist, named after what the sweep runs."""
    module = order.program.rpartition(".")[0].rpartition(".")[2]
    folder = _ROOT / (order.name or module or order.program)
    numbered = (folder.with_name(f"{folder.name}-{number}") for number in itertools.count(2))
    return next(path for path in itertools.chain([folder], numbered) if not path.exists())


def _launch_options(order: SweepOrder) -> LaunchOptions:
    """Return the options of ``ditask`` for a run, checked."""
    words = ["--main", order.program, "--package", str(order.package), *order.options]
    parameters = ditask.make_context("ditask", words).params
    texts = {name: value for name, value in parameters.items() if value is not None}
    arguments = texts.pop("arguments", ())
    return LaunchOptions.from_texts(texts, arguments)


def _imported(order: SweepOrder) -> Callable[..., Any]:
    try:
        main = import_main(order.program, str(order.package))
    except ImportError as error:
        raise ConfigError(f"--main {order.program} cannot be imported: {error}") from error
    if not reads_arguments(main):
        raise ConfigError(
            f"--main {order.program} has no typed parameters, which a sweep could set, such as "
            "seed: int = 0"
        )
    return main


def _word_lists(axes: Sequence[Axis], choosing: Collection[str]) -> list[list[str]]:
    """Return arguments that together have each value, for each choice that others depend on."""
    firsts = {axis.option: axis.examples()[0] for axis in axes}
    choices = [
        [(axis.option, value) for value in axis.examples()]
        for axis in axes
        if axis.option in choosing
    ]
    distinct = {}
    for chosen in itertools.product(*choices):
        base = firsts | dict(chosen)
        for axis in axes:
            for value in [base[axis.option]] if axis.option in choosing else axis.examples():
                words = option_words(axes, base | {axis.option: value})
                distinct[tuple(words)] = words
    return list(distinct.values())
