"""The commands of ``ditask`` that look at runs."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

import click

from dmiddleware.errors import DMiddlewareError
from dmiddleware.process.terminal import can_redraw
from dmiddleware.runs.compare import compare
from dmiddleware.runs.record import EVALUATION
from dmiddleware.runs.report import write_report
from dmiddleware.runs.watch import watch

if TYPE_CHECKING:
    from dmiddleware.policy import HasModes

__all__ = [
    "PassesOn",
    "compare_command",
    "export_command",
    "inspect_command",
    "play_command",
    "report_command",
    "resume_command",
    "watch_command",
]

_HELP: Final = {"help_option_names": ["-h", "--help"], "max_content_width": 100}
_POLICY: Final = click.argument(
    "policy", type=click.Path(exists=True, path_type=Path), metavar="RUN"
)
_MAKER: Final = click.option(
    "--policy",
    "maker",
    metavar="MODULE:FUNCTION",
    help="Function that builds the policy, if its class or its network is your own.",
)
_SIDES: Final = click.argument("sides", nargs=-1, required=True, metavar="[NAME=]RUNS...")
_AT: Final = click.option(
    "--at", type=float, metavar="STEPS", help="Compare at so many steps.  [default: what all have]"
)
_REACH: Final = click.option(
    "--reach", type=float, metavar="RETURN", help="Compare also the steps until this is reached."
)
_REFERENCE: Final = click.option(
    "--reference",
    metavar="FILE",
    help="File with scores of each env that become 0 and 1, for means over envs; zoo: the zoo's.",
)


@contextlib.contextmanager
def _refusing() -> Iterator[None]:
    """Show errors of the user in one line."""
    try:
        yield
    except (DMiddlewareError, OSError, ValueError) as error:
        raise click.ClickException(str(error)) from error


@click.command("compare", context_settings=_HELP)
@_SIDES
@click.option("--metric", default=EVALUATION, show_default=True, help="Metric to compare.")
@_AT
@_REACH
@_REFERENCE
@click.option(
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Picture of the curves to write, such as compare.png.",
)
def compare_command(
    sides: tuple[str, ...],
    metric: str,
    at: float | None,
    reach: float | None,
    reference: str | None,
    output: Path | None,
) -> None:
    """Compare the results of runs, and say how sure the difference is.

    RUNS is a folder with runs in it, a run's folder, or a glob in quotes. The score of a run is the
    mean of the last tenth of its evaluations, up to the steps that all runs have. Intervals cover
    95%.

    \b
      ditask compare runs/dqn runs/c51
      ditask compare runs/dqn runs/c51 --at 40000 --reach 475
      ditask compare "dqn=runs/cartpole_dqn*" "c51=runs/cartpole_c51*" --output compare.png
    """  # noqa: D301 (\b keeps click from rewrapping the paragraph)
    from rich.console import Console

    with _refusing():
        comparison = compare(*sides, metric=metric, at=at, reach=reach, reference=reference)
        Console().print(comparison)
        if output is not None:
            comparison.draw(output)
            click.echo(f"wrote {output}")


@click.command("report", context_settings=_HELP)
@_SIDES
@click.option("--metric", default=EVALUATION, show_default=True, help="Metric that decides.")
@_AT
@_REACH
@_REFERENCE
@click.option(
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    default=Path("report.html"),
    show_default=True,
    help="The page to write.",
)
def report_command(
    sides: tuple[str, ...],
    metric: str,
    at: float | None,
    reach: float | None,
    reference: str | None,
    output: Path,
) -> None:
    """Write one HTML page about runs: curves, throughput, settings, videos.

    RUNS is as for ditask compare. The page is one file, and loads nothing from the network.

    \b
      ditask report runs/cartpole_dqn
      ditask report runs/dqn runs/c51 --output dqn-and-c51.html
    """  # noqa: D301 (\b keeps click from rewrapping the paragraph)
    with _refusing():
        write_report(output, *sides, metric=metric, at=at, reach=reach, reference=reference)
        click.echo(f"wrote {output}")


@click.command("watch", context_settings=_HELP)
@click.argument("run", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option(
    "--every",
    "every_s",
    type=click.FloatRange(min=0.1),
    default=1.0,
    show_default=True,
    metavar="SECONDS",
    help="How often the view is renewed.",
)
def watch_command(run: Path, every_s: float) -> None:
    """Show a running or finished run: its counters and the course of each metric.

    On a terminal the view is renewed until the run ends; elsewhere it is printed once.
    """
    from rich.console import Console

    with _refusing(), contextlib.suppress(KeyboardInterrupt):
        console = Console(force_terminal=can_redraw(sys.stdout))
        watch(run, console, every_s=every_s)


@click.command("inspect", context_settings=_HELP)
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
def inspect_command(file: Path) -> None:
    """Show what a checkpoint or a snapshot holds: a summary, and each value with dtype and shape.

    No code of the file is run.

    \b
      ditask inspect runs/cartpole_dqn/ckpt/best.safetensors
    """  # noqa: D301 (\b keeps click from rewrapping the paragraph)
    from dmiddleware.runs.inspection import describe_checkpoint  # imports torch

    with _refusing():
        click.echo(describe_checkpoint(file))


@click.command("play", context_settings=_HELP)
@_POLICY
@click.option(
    "--episodes", type=click.IntRange(min=1), default=10, show_default=True, help="Episodes."
)
@click.option(
    "--video",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write a video of one more episode (.mp4 or .gif).",
)
@click.option("--seed", type=click.IntRange(min=0), help="Seed of the envs.")
@click.option("--env", "env_id", metavar="ID", help="Env to play in.  [default: that of the run]")
@click.option(
    "--wrapper",
    "wrappers",
    multiple=True,
    metavar="MODULE:NAME",
    help="Wrapper of the env, may be repeated, the innermost first.  [default: those of the run]",
)
@_MAKER
def play_command(
    policy: Path,
    episodes: int,
    video: Path | None,
    seed: int | None,
    env_id: str | None,
    wrappers: tuple[str, ...],
    maker: str | None,
) -> None:
    """Play the best policy of a run in its env, and show the returns.

    RUN is the folder of a run, or a checkpoint in it. The env is the one that config.yaml names,
    with its wrappers. A checkpoint names no code, so a policy of a class of your own is built by a
    function that you name; it gets the arguments of the run's program that it has parameters for.

    \b
      ditask play runs/cartpole_dqn
      ditask play runs/cartpole_dqn/ckpt/final.safetensors --episodes 100 --video cartpole.gif
      ditask play runs/own --policy my_program:make_policy
      ditask play runs/own --env MyEnv-v1 --wrapper my_program:MyWrapper
    """  # noqa: D301 (\b keeps click from rewrapping the paragraph)
    from dmiddleware.env import EnvSettings  # these import torch
    from dmiddleware.rollout import record_video
    from dmiddleware.rollout.video import check_video_path
    from dmiddleware.runs.play import env_of, importing_as, made_by, play, wrappers_of
    from dmiddleware.runs.saved_policy import load_into, saved_policy

    with _refusing(), importing_as(policy):
        if video is not None:
            check_video_path(video)
        if env_id is None:
            env = env_of(policy, wrappers)
        else:
            env = EnvSettings(env_id, env_num=1, wrappers=wrappers)
        if maker is None:
            loaded: HasModes = saved_policy(policy)
        else:
            loaded = made_by(maker, policy)
            load_into(loaded, policy)
        _note_wrappers(wrappers_of(policy), env.wrappers)
        returns = play(loaded, env, n_episode=episodes, seed=seed)
        mean = sum(returns) / len(returns)
        wrapped = f" in {', '.join(map(str, env.wrappers))}" if env.wrappers else ""
        click.echo(
            f"mean return {mean:.1f} over {len(returns)} episodes of {env.id}{wrapped}, "
            f"from {min(returns):.1f} to {max(returns):.1f}"
        )
        if video is not None:
            record_video(loaded, env, video, seed=seed)
            click.echo(f"wrote {video}")


def _note_wrappers(recorded: list[str] | None, played: Sequence[object]) -> None:
    """Say where the env that is played may be another one than the run's."""
    if recorded is None and not played:
        click.echo(
            "note: the run did not record whether its env has wrappers; name them with --wrapper",
            err=True,
        )
    elif recorded and list(played) != recorded:
        click.echo(f"note: the env of the run has the wrappers {', '.join(recorded)}", err=True)


@click.command("export", context_settings=_HELP)
@_POLICY
@click.option(
    "--format",
    "kind",
    type=click.Choice(["onnx", "torch"]),
    default="onnx",
    show_default=True,
    help="onnx, for onnxruntime and others, or torch, for torch.export.load.",
)
@click.option(
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    help="File to write (.onnx or .pt2).  [default: export/policy.onnx in the run's folder]",
)
@click.option("--action-mask", is_flag=True, help="Let the file take a mask of allowed actions.")
@_MAKER
def export_command(
    policy: Path, kind: str, output: Path | None, action_mask: bool, maker: str | None
) -> None:
    """Write the best policy of a run as a file that other tools load, with a model card.

    RUN is the folder of a run, or a checkpoint in it. The file normalizes observations and scales
    actions as the policy does. The card, README.md, is written beside it. A policy of a class of
    your own, or with a network of your own, is built by a function that you name, as for ditask
    play.

    \b
      ditask export runs/cartpole_dqn
      ditask export runs/cartpole_dqn --format torch --output handed-over/policy.pt2
      ditask export runs/own --policy my_program:make_policy
    """  # noqa: D301 (\b keeps click from rewrapping the paragraph)
    from dmiddleware.runs.export import SUFFIXES, export_policy  # these import torch
    from dmiddleware.runs.model_card import check_card, write_model_card
    from dmiddleware.runs.play import importing_as, made_by, run_of
    from dmiddleware.runs.record import part_of

    run, part = run_of(policy), part_of(policy)
    with _refusing(), importing_as(policy):
        name: Literal["onnx", "torch"] = "onnx" if kind == "onnx" else "torch"
        folder = run / "export" if part is None else run / "export" / part
        target = output or folder / f"policy{SUFFIXES[name]}"
        check_card(target.parent)
        exported = export_policy(
            policy,
            target,
            format=name,
            action_mask=action_mask,
            policy=None if maker is None else made_by(maker, policy),
        )
        card = write_model_card(exported, run, part=part)
        click.echo(f"wrote {exported.path} and {card}")


class PassesOn(click.Command):
    """Takes options of ``ditask``, and the arguments of the program after ``--``."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse what comes before ``--``."""
        at = args.index("--") if "--" in args else len(args)
        ctx.params["arguments"] = tuple(args[at + 1 :])
        return super().parse_args(ctx, args[:at])

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        """Return the parts of the line that shows the usage."""
        return [*super().collect_usage_pieces(ctx), "[-- ARGUMENTS]"]


@click.command("resume", cls=PassesOn, context_settings={**_HELP, "ignore_unknown_options": True})
@click.argument("run", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("options", nargs=-1, type=click.UNPROCESSED, metavar="[OPTIONS OF DITASK]")
@click.option("--accept-changes", is_flag=True, help="Continue with settings that have changed.")
def resume_command(
    run: Path, options: tuple[str, ...], arguments: tuple[str, ...], accept_changes: bool
) -> None:
    """Continue a run from its newest whole snapshot, with the program and arguments that it had.

    Start it in the folder where the run was started. It has the same processes, and the same
    options of ditask, except for --env. A setting that differs is shown, and needs
    --accept-changes; a larger limit of a TerminationChecker does not.

    \b
      ditask resume runs/cartpole
      ditask resume runs/cartpole -- --max-env-step 1e6
      ditask resume runs/cartpole --accept-changes --roles learner=1,collector=8,evaluator=1
    """  # noqa: D301 (\b keeps click from rewrapping the paragraph)
    from dmiddleware.launch.cli import ditask
    from dmiddleware.runs.resuming import resume_words, resuming

    with _refusing():
        words = resume_words(run, options, arguments)
    with resuming(run, accept_changes=accept_changes):
        ditask.main(words, prog_name="ditask")
