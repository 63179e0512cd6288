"""Videos of episodes, as files."""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from dmiddleware.env import EnvSettings, make_env, make_env_manager
from dmiddleware.env.factory import of_one_env
from dmiddleware.env.pictures import as_frame
from dmiddleware.errors import ConfigError
from dmiddleware.policy.modes import EvalMode, HasModes
from dmiddleware.rollout.evaluation import evaluate_episodes
from dmiddleware.tree import as_number

__all__ = ["check_video_path", "record_video", "write_video"]

_SUFFIXES: Final = (".mp4", ".gif")
_FPS: Final = 30


def check_video_path(path: str | Path) -> Path:
    """Return a path to which a video can be written.

    Raises:
        ConfigError: if it does not end in .mp4 or .gif, or its folder does not exist.
    """
    path = Path(path)
    if path.suffix.lower() not in _SUFFIXES:
        raise ConfigError(f"{path} must end in .mp4 or .gif")
    if not path.parent.is_dir():
        raise ConfigError(f"the folder {path.parent} does not exist; create it first")
    return path


def record_video(
    policy: HasModes | EvalMode,
    env: str | Callable[..., Any] | EnvSettings,
    path: str | Path,
    *,
    seed: int | None = None,
    max_frames: int = 10_000,
) -> None:
    """Play one episode greedily, and write a video of it, up to the last state.

    Args:
        policy: a policy or its eval mode.
        env: the id of an env or a function that makes one, as
            :func:`~dmiddleware.env.make_env_manager` takes it, or settings with either. A function
            without an argument ``render_mode`` must make an env that renders images itself.
        path: the file; its suffix, .mp4 or .gif, selects the format.
        seed: the seed of the env.
        max_frames: frames in the video at most.

    Raises:
        ConfigError: if the path or the env has a wrong value, or a package is missing.
        EnvStateError: if the env returns no image.
        OSError: if the file cannot be written.
    """
    path = check_video_path(path)
    settings = of_one_env(env if isinstance(env, EnvSettings) else EnvSettings(env, env_num=1))
    if settings.mode == "vector" and (settings.wrappers or not isinstance(settings.id, str)):
        raise ConfigError(
            "record_video plays a single env, and the function or the wrappers of an env with "
            "mode='vector' are for a vector env; pass an id or a function that makes one env, with "
            "wrappers of one env"
        )
    if _takes_render_mode(settings.id):
        filmed = {**settings.env_kwargs, "render_mode": "rgb_array"}
        settings = dataclasses.replace(settings, env_kwargs=filmed)
    with make_env_manager(settings, env_num=1, mode="sync", seed=seed) as envs:
        envs.render()  # refuses an env without images
        video = evaluate_episodes(policy, envs, 1, max_frames=max_frames).get_video()[0]
    recorded = make_env(settings)
    fps = _fps_of(recorded)
    recorded.close()
    write_video(path, list(video.transpose(0, 2, 3, 1)), fps=fps)


def _takes_render_mode(env: object) -> bool:
    """Return whether the env can be made with another ``render_mode`` than its own."""
    if not callable(env):
        return True
    try:
        inspect.signature(env).bind_partial(render_mode="rgb_array")
    except TypeError:
        return False
    except ValueError:
        pass  # a function in C may not say what it takes
    return True


def _fps_of(env: Any) -> int:
    """Return the frames per second that an env asks for."""
    metadata = getattr(env, "metadata", None)
    fps = as_number(metadata.get("render_fps")) if isinstance(metadata, Mapping) else None
    return round(fps) if fps is not None and 1 <= fps < math.inf else _FPS


def write_video(path: str | Path, frames: Sequence[Any], *, fps: int) -> None:
    """Write frames as a video.

    Args:
        path: the file; its suffix, .mp4 or .gif, selects the format.
        frames: at least one image, ``[H, W, 3] uint8`` or another form that ``env.render()`` may
            return; smaller ones are padded with black.
        fps: frames per second.

    Raises:
        ConfigError: if the path has a wrong value, there are no frames, or a package is missing.
        EnvStateError: if a frame is not an image.
        OSError: if the file cannot be written.
    """
    path = check_video_path(path)
    images = [as_frame(frame) for frame in frames]
    if not images:
        raise ConfigError(f"frames is empty; {path} needs at least one image")
    height, width = np.max([image.shape[:2] for image in images], axis=0).tolist()
    video = np.zeros((len(images), height, width, 3), np.uint8)
    for target, image in zip(video, images, strict=True):
        target[: image.shape[0], : image.shape[1]] = image
    if path.suffix.lower() == ".gif":
        from dmiddleware.tensorboard import encode_video

        path.write_bytes(encode_video(video.transpose(0, 3, 1, 2)[None], fps=fps))
        return
    imageio: Any
    try:
        import imageio.v3 as imageio
    except ImportError as error:
        raise ConfigError(
            "only .gif works without imageio; run: pip install 'dmiddleware[video]'"
        ) from error
    imageio.imwrite(path, list(video), fps=fps)
