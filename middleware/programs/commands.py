"""The command ``ditask train``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

import click

from dmiddleware.command_line import arguments_of, called_as
from dmiddleware.errors import DMiddlewareError
from dmiddleware.launch.options import options_and_flags
from dmiddleware.zoo import Result, algorithms, tuned
from dmiddleware.zoo.tuned import train_arguments
from middleware.programs.code import chain_code
from middleware.programs.parts import make_policy
from middleware.programs.train import program_of

__all__ = ["train_command"]

_HELP: Final = ("-h", "--help")


@click.command(
    "train",
    add_help_option=False,
    options_metavar="[OPTIONS]",
    context_settings={"ignore_unknown_options": True, "max_content_width": 100},
)
@click.option("--list", "lists", is_flag=True, help="Show the algorithms, and what they reached.")
@click.option("--show-chain", is_flag=True, help="Print the chain as code instead of training.")
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="ALGO ENV")
@click.pass_context
def train_command(
    ctx: click.Context, words: tuple[str, ...], lists: bool, show_chain: bool
) -> None:
    """Train an algorithm in an environment, with tuned settings where there are any.

    The algorithm's program has the same options: ditask train ALGO ENV --help shows them. With
    --wrapper module:name, which may be repeated, the innermost first, envs are wrapped.

    \b
      ditask train --list
      ditask train dqn CartPole-v1 --seed 1
      ditask train sac HalfCheetah-v5 --policy.learning-rate-q 1e-3 --max-env-step 1e6
      ditask train iql Pendulum-v1 --data Pendulum-v1/mixed-v0
      ditask train ppo CartPole-v1 --show-chain > cartpole.py
      ditask train ppo CartPole-v1 --wrapper my_program:MyWrapper

    \b
    In several processes, with the options of ditask before the command:
      ditask --parallel-workers 4 train impala CartPole-v1 --seed 1
    """  # noqa: D301 (\b keeps click from rewrapping the paragraph)
    names = [word for word in words[:2] if not word.startswith("-")]
    try:
        if lists:
            _print_list(names[:1] or algorithms())
        elif len(names) == 2:
            _refuse_launch_options(words, ctx)
            _train(names[0], names[1], words[2:], show_chain=show_chain)
        elif set(words).intersection(_HELP):
            click.echo(ctx.get_help())
        else:
            raise click.UsageError(
                "name an algorithm and an env first, and options after them, such as: "
                "ditask train dqn CartPole-v1 --seed 1",
                ctx,
            )
    except DMiddlewareError as error:
        raise click.ClickException(str(error)) from error


def _refuse_launch_options(words: tuple[str, ...], ctx: click.Context) -> None:
    launch_options = {"--" + info.name.replace("_", "-") for info, _ in options_and_flags()}
    for word in words:
        if (option := word.partition("=")[0]) in launch_options:
            raise click.UsageError(
                f"{option} is for several processes, and comes before the command: "
                f"ditask {option} ... train {words[0]} {words[1]}",
                ctx,
            )


def _train(algo: str, env: str, line: tuple[str, ...], *, show_chain: bool) -> None:
    program = program_of(algo)
    arguments = arguments_of(
        program, train_arguments(algo, env, line), prog=f"ditask train {algo} {env}"
    )
    if show_chain:
        settings = (arguments[name] for name in ("algo", "env", "policy", "seed"))
        click.echo(chain_code(tuned(algo).program, arguments, make_policy(*settings)), nl=False)
        return
    with called_as(program, arguments):
        program(**arguments)


def _print_list(names: Iterable[str]) -> None:
    head = ("algorithm", "env", "goal", "env steps", "best policy", "last policy", "seeds")
    rows = [head, *(row for name in names for row in _rows(name))]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = zip(row, widths, strict=True)
        parts = [
            cell.ljust(width) if at < 2 else cell.rjust(width)
            for at, (cell, width) in enumerate(cells)
        ]
        click.echo("  ".join(parts).rstrip())
    click.echo(
        "\nThe goal is a mean return that ends the training, and the env steps are those to it, "
        "from\nthe least to the most over the seeds. Without a goal, the env steps are the "
        "budget, and the best\nand the last policy have mean returns over fresh episodes. In "
        "other envs, the algorithms have\ntheir defaults."
    )


def _rows(algo: str) -> Iterator[tuple[str, ...]]:
    entries = tuned(algo).entries
    if not entries:
        yield algo, "any", *[""] * 5
    for env, entry in entries.items():
        goal = "" if entry.stop_value is None else f"{entry.stop_value:g}"
        if (in_a_row := entry.options.get("evaluator", {}).get("stop_evaluations", 1)) > 1:
            goal += f", {in_a_row} in a row"
        yield algo, env, goal, *_figures(entry.result)


def _figures(result: Result | None) -> tuple[str, str, str, str]:
    """Return the env steps, the best and the last policy's return, and the number of seeds."""
    if result is None:
        return "not recorded", "", "", ""
    seeds = str(result.n_seed)
    if result.best is not None and result.last is not None:
        steps = f"{result.env_step:,}" if result.env_step else "offline"
        return steps, f"{result.best:,.1f}", f"{result.last:,.1f}", seeds
    if result.steps is None:
        return "not reached", "", "", seeds
    steps = " to ".join(f"{at:,}" for at in sorted(set(result.steps)))
    if result.n_reached < result.n_seed:
        seeds = f"{result.n_reached} of {result.n_seed}"
    return steps, "", "", seeds
