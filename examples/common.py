"""The command line of the examples: options for training, evaluating a checkpoint and filming."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args, get_origin, get_type_hints

import click
import gymnasium as gym
from PIL import Image

from dmiddleware import DMiddlewareError
from dmiddleware.data import load_checkpoint
from dmiddleware.env import make_env_manager
from dmiddleware.policy import Policy
from dmiddleware.rollout import evaluate_episodes
from dmiddleware.seeding import derive_seed

__all__ = ["command"]

MAX_FRAMES = 10_000
_FLAGS = {
    "compiled": "Compile the update.",
    "resume": "Continue the run in the folder, from its newest snapshot.",
}
"""The flags that an example may have, and their help."""

Env: TypeAlias = str | Callable[..., gym.Env[Any, Any]]
"""The id of an environment, or a function that makes one."""


def fresh_returns(
    policy: Policy, env: Env, ckpt: Path, *, n_episode: int, seed: int
) -> list[float]:
    """Return the returns of a saved policy in episodes with seeds that training does not use."""
    policy.eval_mode.load_state_dict(load_checkpoint(ckpt))
    seed = derive_seed(seed, "fresh episodes")
    with make_env_manager(env, env_num=min(n_episode, 25), seed=seed) as envs:
        return evaluate_episodes(policy.eval_mode, envs, n_episode).get_episode_return()


def record_video(policy: Policy, env: Env, path: Path, *, seed: int) -> None:
    """Film one episode of the policy; the suffix of the file (.mp4, .gif) selects the format."""
    envs = make_env_manager(env, env_num=1, seed=seed, env_kwargs={"render_mode": "rgb_array"})
    with envs:
        film = evaluate_episodes(policy, envs, 1, max_frames=MAX_FRAMES).get_video()[0]
    made = gym.make(env) if isinstance(env, str) else env()
    write_film(path, list(film.transpose(0, 2, 3, 1)), fps=made.metadata["render_fps"])


def write_film(path: Path, frames: list[Any], *, fps: int) -> None:
    """Write frames ``[H, W, 3] uint8`` as a film."""
    if path.suffix.lower() == ".gif":
        first, *rest = [Image.fromarray(frame) for frame in frames]
        first.save(path, save_all=True, append_images=rest, duration=1000 // fps, loop=0)
        return
    try:
        import imageio.v3 as imageio
    except ImportError as error:
        raise click.ClickException(
            "only .gif works without imageio; run: pip install 'dmiddleware[video]'"
        ) from error
    imageio.imwrite(path, frames, fps=fps)


def command(
    default_env: Env, make_policy: Callable[..., Policy], main: Callable[..., object]
) -> click.Command:
    """Make the command line of an example.

    Args:
        default_env: the environment for ``--evaluate``.
        make_policy: builds the policy, for ``--evaluate`` to load a checkpoint into.
        main: trains the policy; its defaults are those of the options. A parameter whose type is a
            ``Literal`` or a float is a further option, one whose type is a bool a further flag;
            ``make_policy`` may take them too. ``env`` is also the environment for ``--evaluate``.
    """
    taken = inspect.signature(make_policy).parameters
    default = {name: p.default for name, p in inspect.signature(main).parameters.items()}

    @click.command(help=inspect.getdoc(main), context_settings={"show_default": True})
    @click.option(
        "--seed",
        type=click.IntRange(min=0),
        default=default["seed"],
        help="Seed of everything random.",
    )
    @click.option("--exp-name", default=default["exp_name"], help="Folder of the run in runs/.")
    @click.option(
        "--max-env-step",
        type=click.IntRange(min=1),
        default=default["max_env_step"],
        help="Maximum number of environment steps.",
    )
    @click.option(
        "--evaluate",
        type=click.Path(path_type=Path),
        help="Evaluate this checkpoint instead of training.",
    )
    @click.option(
        "--episodes",
        type=click.IntRange(min=1),
        default=100,
        help="Number of episodes with --evaluate.",
    )
    @click.option(
        "--video",
        type=click.Path(path_type=Path),
        callback=_check_film,
        help="Film one episode with --evaluate (.mp4 or .gif).",
    )
    def run(
        seed: int,
        exp_name: str,
        max_env_step: int,
        evaluate: Path | None,
        episodes: int,
        video: Path | None,
        **others: Any,
    ) -> None:
        if evaluate is None:
            if video is not None:
                raise click.UsageError("--video needs a checkpoint; name one with --evaluate")
            main(seed=seed, exp_name=exp_name, max_env_step=max_env_step, **others)
            return
        policy = make_policy(seed, **{name: one for name, one in others.items() if name in taken})
        env = others.get("env", default_env)
        try:
            returns = fresh_returns(policy, env, evaluate, n_episode=episodes, seed=seed)
        except (DMiddlewareError, OSError) as error:
            raise click.ClickException(str(error)) from error
        click.echo(
            f"mean return {sum(returns) / len(returns):.1f} over {len(returns)} fresh episodes of "
            f"{evaluate}, from {min(returns):.1f} to {max(returns):.1f}"
        )
        if video is not None:
            record_video(policy, env, video, seed=seed)
            click.echo(f"saved an episode to {video}")

    hints = get_type_hints(main)
    for name in default:
        kind = hints[name]
        words = [f"--{name.replace('_', '-')}"]
        if get_origin(kind) is Literal:
            choice = click.Choice(get_args(kind))
            run.params.append(click.Option(words, type=choice, default=default[name]))
        elif kind is float:
            run.params.append(click.Option(words, type=float, default=default[name]))
        elif kind is bool:
            run.params.append(click.Option(words, is_flag=True, help=_FLAGS[name]))
    return run


def _check_film(_: click.Context, __: click.Parameter, path: Path | None) -> Path | None:
    """Reject an unusable path before any episode is played."""
    if path is not None and path.suffix.lower() not in (".mp4", ".gif"):
        raise click.BadParameter(f"{path} must end in .mp4 or .gif")
    if path is not None and not path.parent.is_dir():
        raise click.BadParameter(f"the folder {path.parent} does not exist; create it first")
    return path
