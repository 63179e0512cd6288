"""The command ``ditask sweep``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Final, Literal

import click

from dmiddleware.env import EnvSettings
from dmiddleware.errors import DMiddlewareError
from dmiddleware.runs.commands import PassesOn
from dmiddleware.runs.record import EVALUATION
from dmiddleware.sweep.new_sweep import SweepOrder, free_folder, make_sweep
from dmiddleware.sweep.optuna_source import OptunaSource, check_optuna
from dmiddleware.sweep.sweep_display import SweepDisplay
from dmiddleware.sweep.sweep_plan import Search, SweepPlan, held, read_plan
from dmiddleware.sweep.sweeping import GridSource, run_sweep
from dmiddleware.zoo import tuned
from dmiddleware.zoo.tuned import train_arguments
from middleware.programs.parts import name_of_run

__all__ = ["sweep_command"]

_TRIALS: Final = 20


@click.command(
    "sweep",
    cls=PassesOn,
    context_settings={
        "help_option_names": ["-h", "--help"],
        "max_content_width": 100,
        "ignore_unknown_options": True,
    },
)
@click.argument(
    "words", nargs=-1, type=click.UNPROCESSED, metavar="[train ALGO ENV] [OPTIONS OF DITASK]"
)
@click.option("--main", metavar="NAME", help="The program, package.module.function.")
@click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="NAME=VALUES",
    help="A setting to vary, may be repeated: a list (1e-4,3e-4) or a range of integers without "
    "its end (0:5). For Optuna also numbers (0.9:0.999, log:1e-5:1e-2).",
)
@click.option(
    "--jobs", type=click.IntRange(min=1), default=1, show_default=True, help="Runs at a time."
)
@click.option(
    "--output",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="The folder of the sweep.  [default: sweeps/ and the program's name]",
)
@click.option(
    "--resume",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    metavar="DIR",
    help="Continue the sweep in this folder; only --jobs may be given too.",
)
@click.option(
    "--package",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    default=Path(),
    metavar="DIR",
    help="Folder to put first on the import path.  [default: the working directory]",
)
@click.option("--metric", default=EVALUATION, show_default=True, help="Metric of the score.")
@click.option(
    "--sampler",
    type=click.Choice(["grid", "optuna"]),
    default="grid",
    show_default=True,
    help="Run all combinations, or let Optuna choose settings by the scores before.",
)
@click.option(
    "--trials",
    type=click.IntRange(min=1),
    default=_TRIALS,
    show_default=True,
    help="Optuna: number of runs.",
)
@click.option(
    "--direction",
    type=click.Choice(["maximize", "minimize"]),
    default="maximize",
    show_default=True,
    help="Optuna: which scores are good.",
)
@click.option(
    "--pruner",
    type=click.Choice(["median", "none"]),
    default="median",
    show_default=True,
    help="Optuna: stop a run that is worse than the median of the others, or none.",
)
@click.pass_context
def sweep_command(
    ctx: click.Context,
    /,
    words: tuple[str, ...],
    arguments: tuple[str, ...],
    resume: Path | None,
    jobs: int,
    output: Path | None,
    **given: Any,
) -> None:
    """Run a program with several settings, each in processes and a folder of its own.

    The names are options of the program; the last part is enough if it is unique. Arguments that
    all runs have follow --, and options of ditask, such as --roles, are passed on. The score of a
    run is the mean of the last tenth of its evaluations.

    \b
      ditask sweep --main examples.cartpole_dqn.main --set learning_rate=1e-4,3e-4 --set seed=0:5
             --jobs 2 -- --max-env-step 20000
      ditask sweep train dqn CartPole-v1 --set n_step=1,3 --set seed=0:5 --jobs 2
      ditask sweep train dqn CartPole-v1 --sampler optuna --trials 30
             --set learning_rate=log:1e-5:1e-2 --set batch_size=32,64,128
      ditask sweep --resume sweeps/cartpole_dqn
    """  # noqa: D301 (\b keeps click from rewrapping the paragraph)
    try:
        if resume is not None:
            if words or arguments or given["main"] or given["settings"] or output:
                raise click.UsageError("--resume takes the settings of its plan; add only --jobs")
            folder, plan = resume, read_plan(resume)
        else:
            order = _order(ctx, words, arguments, **given)
            folder = output or free_folder(order)
            plan = make_sweep(order, folder)
        code = _run(folder, plan, jobs)
    except DMiddlewareError as error:
        raise _Refused(str(error)) from error
    except OSError as error:  # such as a full disk
        raise click.ClickException(f"the sweep cannot continue: {error}") from error
    sys.exit(code)


class _Refused(click.ClickException):
    """Nothing was started."""

    exit_code = 2


def _order(
    ctx: click.Context,
    words: tuple[str, ...],
    arguments: tuple[str, ...],
    *,
    main: str | None,
    settings: tuple[str, ...],
    package: Path,
    metric: str,
    sampler: str,
    trials: int,
    direction: Literal["maximize", "minimize"],
    pruner: str,
) -> SweepOrder:
    name = ""
    if words[:1] == ("train",) and main is None:
        if len(words) < 3:
            raise click.UsageError("name an algorithm and an env: sweep train dqn CartPole-v1", ctx)
        (_, algo, env), words = words[:3], words[3:]
        main = tuned(algo).main
        arguments = tuple(train_arguments(algo, env, arguments))
        name = name_of_run(algo, EnvSettings(env, env_num=1))
    if main is None:
        raise click.UsageError("name a program with --main, or: train ALGO ENV", ctx)
    if not settings:
        raise click.UsageError("name what to vary, such as --set learning_rate=1e-4,3e-4", ctx)
    if sampler == "optuna":
        check_optuna()
    elif ctx.get_parameter_source("trials") is click.core.ParameterSource.COMMANDLINE:
        raise click.UsageError("--trials is for --sampler optuna", ctx)
    return SweepOrder(
        program=main,
        settings=settings,
        package=package,
        options=words,
        arguments=arguments,
        metric=metric,
        search=Search(trials, direction, pruner == "median") if sampler == "optuna" else None,
        name=name,
    )


def _run(folder: Path, plan: SweepPlan, jobs: int) -> int:
    with held(folder), SweepDisplay() as display:
        if plan.search is None:
            return run_sweep(folder, plan, GridSource(plan.grid_runs(folder)), display, jobs=jobs)
        check_optuna()
        return run_sweep(folder, plan, OptunaSource(folder, plan), display, jobs=jobs)
