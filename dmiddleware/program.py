"""Run a program from its command line."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

from dmiddleware.command_line import arguments_of, called_as, exit_after_ctrl_c
from dmiddleware.data import load_checkpoint
from dmiddleware.env import EnvSettings
from dmiddleware.errors import ConfigError, DMiddlewareError
from dmiddleware.policy import Policy
from dmiddleware.rollout import record_video
from dmiddleware.rollout.video import check_video_path
from dmiddleware.runs.play import play as play_episodes
from dmiddleware.seeding import derive_seed
from dmiddleware.settings import Count, Settings

__all__ = ["run_program"]

R = TypeVar("R")


class _PlaySettings(Settings):
    """The options of a program that evaluates checkpoints."""

    evaluate: Path | None = None
    """Evaluate this checkpoint instead of training. Options that are not given are those of the
    run that saved it."""
    episodes: Count = 100
    """Number of episodes with --evaluate."""
    video: Path | None = None
    """Write a video of one episode with --evaluate (.mp4 or .gif)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.video is not None:
            if self.evaluate is None:
                raise ConfigError("--video needs a checkpoint; name one with --evaluate")
            check_video_path(self.video)


def run_program(
    main: Callable[..., R],
    arguments: Sequence[str] | None = None,
    *,
    make_policy: Callable[..., Policy] | None = None,
    play_env: EnvSettings | None = None,
) -> R | None:
    """Call a program with the arguments of its command line.

    The options are the parameters of the function, see :mod:`dmiddleware.command_line`. ``--config
    FILE`` takes the values of an earlier run's ``config.yaml``, or of any YAML file, as defaults.
    :class:`~middleware.Experiment` saves what the program was called with::

        def main(seed: Whole = 0, policy: DQNSettings = DQNSettings(n_step=3)) -> None:
            ...

        if __name__ == "__main__":
            run_program(main)

    Args:
        main: the program. Its parameters are annotated, and the section ``Args:`` of its docstring
            says what they mean; those that are settings have a default.
        arguments: the command line; None: ``sys.argv``.
        make_policy: builds the policy from some of the program's arguments, by name. If it is
            given, the options ``--evaluate CHECKPOINT``, ``--episodes`` and ``--video`` play a
            saved policy instead.
        play_env: the env to play in; None: that of the program's parameter ``env``.

    Returns:
        What the program returns; None after an evaluation.

    Raises:
        SystemExit: with 2, after a message, for an unknown option or a wrong value; with 0, after
            the help; with 1, if a checkpoint cannot be evaluated; with 130, after Ctrl-C.
        BaseException: what the program raises.
    """
    line = sys.argv[1:] if arguments is None else list(arguments)
    if make_policy is None:
        given = arguments_of(main, line)
    else:
        given = arguments_of(main, line, further=_PlaySettings)
        ckpt = given["evaluate"]
        saved = None if ckpt is None else ckpt.parent.parent / "config.yaml"
        if saved is not None and saved.is_file():
            given = arguments_of(main, ["--config", str(saved), *line], further=_PlaySettings)
        play = _PlaySettings(**{name: given.pop(name) for name in vars(_PlaySettings())})
        if play.evaluate is not None:
            _play(make_policy, given, play.evaluate, play, play_env or given["env"])
            return None
    with called_as(main, given), exit_after_ctrl_c():
        return main(**given)


def _play(
    make_policy: Callable[..., Policy],
    given: Mapping[str, Any],
    ckpt: Path,
    play: _PlaySettings,
    env: EnvSettings,
) -> None:
    """Evaluate a checkpoint, and print its returns."""
    taken = inspect.signature(make_policy).parameters
    seed = derive_seed(given.get("seed", 0), "fresh episodes")
    try:
        policy = make_policy(**{name: value for name, value in given.items() if name in taken})
        policy.eval_mode.load_state_dict(load_checkpoint(ckpt))
        returns = play_episodes(policy, env, n_episode=play.episodes, seed=seed)
        click.echo(
            f"mean return {sum(returns) / len(returns):.1f} over {len(returns)} fresh episodes of "
            f"{ckpt}, from {min(returns):.1f} to {max(returns):.1f}"
        )
        if play.video is not None:
            record_video(policy, env, play.video, seed=seed)
            click.echo(f"saved an episode to {play.video}")
    except (DMiddlewareError, OSError) as error:
        click.echo(f"Error: {error}", err=True)
        raise SystemExit(1) from error
