"""What the examples share: their command line, and what they tell at the end.

The training itself is in each example, from top to bottom.
"""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
import gymnasium as gym
import torch
from PIL import Image

from dmiddleware import DMiddlewareError, Task
from dmiddleware.data import from_numpy, load_checkpoint
from dmiddleware.env import make_env_manager
from dmiddleware.pipeline import current_node
from dmiddleware.policy import Policy
from dmiddleware.rollout import evaluate_episodes
from dmiddleware.seeding import derive_seed, seed_libraries
from middleware import RunFolder

__all__ = ["Result", "command", "finish", "start"]

FRESH_EPISODES = 100


@dataclass(frozen=True, slots=True)
class Result:
    """What a training came to.

    Attributes:
        mean_return: over fresh episodes of the saved policy that evaluated best; NaN in a process
            that is not the learner, which leaves that to it.
        env_step: environment steps.
        train_iter: updates.
        train_s: seconds that the training took, its evaluations included.
        path: the run's folder.
    """

    mean_return: float
    env_step: int
    train_iter: int
    train_s: float
    path: Path

    @property
    def ckpt(self) -> Path:
        """The checkpoint of the policy that evaluated best; without evaluations, of the last."""
        return _best_ckpt(RunFolder(self.path))

    def load_best(self) -> dict[str, Any]:
        """Return the saved state of the policy that evaluated best."""
        state: dict[str, Any] = load_checkpoint(self.ckpt)
        return state

    def __str__(self) -> str:
        return (
            f"mean return {self.mean_return:.1f} over {FRESH_EPISODES} fresh episodes of the best "
            f"policy, after {self.env_step:,} env steps and {self.train_iter:,} updates in "
            f"{self.train_s:.1f} s; files in {self.path}/"
        )


@contextmanager
def start(exp_name: str, cfg: Mapping[str, Any], *, seed: int) -> Iterator[RunFolder]:
    """Make the run's folder, with its config and a text log; seed what has no seed of its own."""
    # Networks this small gain nothing from more threads, and lose much to their waking up.
    torch.set_num_threads(1)
    node = current_node()
    seed_libraries(seed if node is None else derive_seed(seed, "node", node.node_id))
    with RunFolder.create(exp_name) as run:
        run.save_config({"seed": seed, "policy": cfg})
        log = logging.FileHandler(run.log_path, encoding="utf-8")
        log.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        root = logging.getLogger()
        root.addHandler(log)
        level, _ = root.level, root.setLevel(logging.INFO)
        try:
            yield run
        finally:
            root.setLevel(level)
            root.removeHandler(log)
            log.close()


def finish(run: RunFolder, task: Task[Any], policy: Policy, env_id: str) -> Result:
    """Judge the saved policy that evaluated best, in episodes that it has not seen, and tell.

    Of several processes the learner does so; the others return at once.
    """
    result = Result(
        mean_return=math.nan,
        env_step=getattr(task.ctx, "env_step", 0),
        train_iter=task.ctx.train_iter,
        train_s=run.age_s,
        path=run.path,
    )
    if not run.is_lead:
        return result
    returns = fresh_returns(
        policy, env_id, _best_ckpt(run), n_episode=FRESH_EPISODES, seed=task.seed
    )
    result = replace(result, mean_return=sum(returns) / len(returns))
    click.echo(result)
    return result


def fresh_returns(
    policy: Policy, env_id: str, ckpt: Path, *, n_episode: int, seed: int
) -> list[float]:
    """Return the returns of a saved policy in episodes whose seeds no training uses."""
    policy.eval_mode.load_state_dict(load_checkpoint(ckpt))
    seed = derive_seed(seed, "fresh episodes")
    with make_env_manager(env_id, env_num=min(n_episode, 25), seed=seed) as envs:
        return evaluate_episodes(policy.eval_mode, envs, n_episode).get_episode_return()


def record_video(policy: Policy, env_id: str, path: Path, *, seed: int) -> None:
    """Film one episode of the policy; the suffix of the file (.mp4, .gif) tells the format."""
    envs = make_env_manager(env_id, env_num=1, seed=seed, env_kwargs={"render_mode": "rgb_array"})
    frames = []
    with envs:
        done = False
        while not done:
            frames.extend(envs.render())
            action = policy.eval_mode.forward(from_numpy(envs.ready_obs))["action"]
            done = bool(envs.step(action.numpy()).done[0])
    write_film(path, frames, fps=gym.make(env_id).metadata["render_fps"])


def write_film(path: Path, frames: list[Any], *, fps: int) -> None:
    """Write pictures ``[H, W, 3] uint8`` as a film."""
    if path.suffix.lower() == ".gif":
        first, *rest = [Image.fromarray(frame) for frame in frames]
        first.save(path, save_all=True, append_images=rest, duration=1000 // fps, loop=0)
        return
    try:
        import imageio.v3 as imageio
    except ImportError as error:
        raise click.ClickException(
            "films other than .gif need more: pip install 'dmiddleware[video]'"
        ) from error
    imageio.imwrite(path, frames, fps=fps)


def command(
    env_id: str, make_policy: Callable[..., Policy], main: Callable[..., Result]
) -> click.Command:
    """Make the command line of an example.

    Args:
        env_id: the environment that ``--evaluate`` plays.
        make_policy: builds the policy, for ``--evaluate`` to load a checkpoint into.
        main: trains; its defaults are those of the options.
    """
    default = {name: p.default for name, p in inspect.signature(main).parameters.items()}

    @click.command(help=inspect.getdoc(main), context_settings={"show_default": True})
    @click.option(
        "--seed",
        type=click.IntRange(min=0),
        default=default["seed"],
        help="Seed of everything random.",
    )
    @click.option("--exp-name", default=default["exp_name"], help="Folder of the run, in runs/.")
    @click.option(
        "--max-env-step",
        type=click.IntRange(min=1),
        default=default["max_env_step"],
        help="Environment steps at most.",
    )
    @click.option(
        "--evaluate", type=click.Path(path_type=Path), help="Play this checkpoint; do not train."
    )
    @click.option(
        "--episodes",
        type=click.IntRange(min=1),
        default=FRESH_EPISODES,
        help="Episodes to play with --evaluate.",
    )
    @click.option(
        "--video",
        type=click.Path(path_type=Path),
        callback=_check_film,
        help="Film one of them (.mp4 or .gif).",
    )
    def run(
        seed: int,
        exp_name: str,
        max_env_step: int,
        evaluate: Path | None,
        episodes: int,
        video: Path | None,
    ) -> None:
        if evaluate is None:
            if video is not None:
                raise click.UsageError("--video films a checkpoint; name one with --evaluate")
            main(seed=seed, exp_name=exp_name, max_env_step=max_env_step)
            return
        policy = make_policy(seed)
        try:
            returns = fresh_returns(policy, env_id, evaluate, n_episode=episodes, seed=seed)
        except (DMiddlewareError, OSError) as error:
            raise click.ClickException(str(error)) from error
        click.echo(
            f"mean return {sum(returns) / len(returns):.1f} over {len(returns)} fresh episodes of "
            f"{evaluate}, from {min(returns):.1f} to {max(returns):.1f}"
        )
        if video is not None:
            record_video(policy, env_id, video, seed=seed)
            click.echo(f"an episode is in {video}")

    return run


def _check_film(_: click.Context, __: click.Parameter, path: Path | None) -> Path | None:
    """Refuse what no film can be written to, before any episode is played."""
    if path is not None and path.suffix.lower() not in (".mp4", ".gif"):
        raise click.BadParameter(f"{path} ends neither in .mp4 nor in .gif")
    if path is not None and not path.parent.is_dir():
        raise click.BadParameter(f"there is no folder {path.parent}; make it first")
    return path


def _best_ckpt(run: RunFolder) -> Path:
    return run.best_ckpt if run.best_ckpt.exists() else run.ckpt_dir / "final.safetensors"
