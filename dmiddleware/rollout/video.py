"""Videos of episodes, as files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from dmiddleware.env import EnvSettings, make_env, make_env_manager
from dmiddleware.errors import ConfigError
from dmiddleware.policy.modes import EvalMode, HasModes
from dmiddleware.rollout.evaluation import evaluate_episodes

__all__ = ["check_video_path", "record_video", "write_video"]

_SUFFIXES: Final = (".mp4", ".gif")
_FPS: Final = 30


def check_video_path(path: Path) -> None:
    """Refuse a path that no video can be written to.

    Raises:
        ConfigError: if it does not end in .mp4 or .gif, or its folder does not exist.
    """
    if path.suffix.lower() not in _SUFFIXES:
        raise ConfigError(f"{path} must end in .mp4 or .gif")
    if not path.parent.is_dir():
        raise ConfigError(f"the folder {path.parent} does not exist; create it first")


def record_video(
    policy: HasModes | EvalMode,
    env: EnvSettings,
    path: Path,
    *,
    seed: int | None = None,
    max_frames: int = 10_000,
) -> None:
    """Play one episode greedily, and write a video of it.

    Args:
        policy: a policy or its eval mode.
        env: the env; it must take ``render_mode="rgb_array"``.
        path: the file; its suffix, .mp4 or .gif, selects the format.
        seed: the seed of the env.
        max_frames: frames in the video at most.

    Raises:
        ConfigError: if the path or the env has a wrong value, or a package is missing.
        OSError: if the file cannot be written.
    """
    check_video_path(path)
    filmed = {**env.env_kwargs, "render_mode": "rgb_array"}
    with make_env_manager(env, env_num=1, mode="sync", env_kwargs=filmed, seed=seed) as envs:
        video = evaluate_episodes(policy, envs, 1, max_frames=max_frames).get_video()[0]
    made = make_env(env)
    fps = int(made.metadata.get("render_fps") or _FPS)
    made.close()
    write_video(path, list(video.transpose(0, 2, 3, 1)), fps=fps)


def write_video(path: Path, frames: Sequence[npt.NDArray[np.uint8]], *, fps: int) -> None:
    """Write frames as a video.

    Args:
        path: the file; its suffix, .mp4 or .gif, selects the format.
        frames: ``[H, W, 3] uint8`` each.
        fps: frames per second.

    Raises:
        ConfigError: if the path has a wrong value, or a package is missing.
        OSError: if the file cannot be written.
    """
    check_video_path(path)
    if path.suffix.lower() == ".gif":
        from dmiddleware.tensorboard import encode_video

        path.write_bytes(encode_video(np.stack(frames).transpose(0, 3, 1, 2)[None], fps=fps))
        return
    imageio: Any
    try:
        import imageio.v3 as imageio
    except ImportError as error:
        raise ConfigError(
            "only .gif works without imageio; run: pip install 'dmiddleware[video]'"
        ) from error
    imageio.imwrite(path, frames, fps=fps)
