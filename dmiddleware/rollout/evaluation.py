"""Evaluation: playing whole episodes, and which of them count."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from dmiddleware.env import BaseEnvManager
from dmiddleware.env.batching import own_copy
from dmiddleware.errors import ConfigError, EnvStateError
from dmiddleware.policy import EvalMode, HasModes, as_eval_mode
from dmiddleware.rollout.episode_info import SUCCESS_KEYS, share_of
from dmiddleware.rollout.episode_watch import EpisodeWatch
from dmiddleware.rollout.stepper import Stepper
from dmiddleware.tree import as_number

__all__ = ["VectorEvalMonitor", "evaluate_episodes"]

_USER: Final = "evaluate_episodes"

Frame = npt.NDArray[np.uint8]


@dataclass(slots=True)
class _Video:
    """The frames of one episode, compressed: most of them are almost flat color."""

    frames: list[tuple[tuple[int, ...], bytes]] = field(default_factory=list)
    episode_return: float = 0.0

    def add(self, frame: Frame) -> None:
        self.frames.append((frame.shape, zlib.compress(frame.tobytes(), level=1)))

    @property
    def size(self) -> tuple[int, ...]:
        """The shape of the largest frame."""
        return tuple(np.max([shape for shape, _ in self.frames], axis=0).tolist())

    def decode(self, size: tuple[int, ...]) -> Frame:
        """Return the frames, ``[T, *size]``; smaller ones are padded with black."""
        decoded = np.zeros((len(self.frames), *size), np.uint8)
        for target, (shape, data) in zip(decoded, self.frames, strict=True):
            pixels = np.frombuffer(zlib.decompress(data), np.uint8).reshape(shape)
            target[: shape[0], : shape[1]] = pixels
        return decoded


class VectorEvalMonitor:
    """Gives each env a fixed share of the episodes, so that fast envs do not count more.

    If the first ``n_episode`` that end counted, short episodes would be over-represented. Here the
    first episodes of each env count, up to its share; episodes that it plays after that do not.

    Args:
        env_num: number of envs.
        n_episode: number of episodes; the remainder goes to the first envs.
        max_frames: longest video of an episode, in frames; None: no limit.

    Raises:
        ConfigError: if there are fewer episodes than envs.
    """

    def __init__(self, env_num: int, n_episode: int, *, max_frames: int | None = None) -> None:
        if n_episode < env_num:
            raise ConfigError(
                f"{n_episode} episode(s) cannot be spread over {env_num} envs; evaluate at least "
                "one episode per env, or in fewer envs"
            )
        share, n_extra = divmod(n_episode, env_num)
        self._shares = [share + (env < n_extra) for env in range(env_num)]
        self._returns: list[list[float]] = [[] for _ in range(env_num)]
        self._infos: list[list[dict[str, Any]]] = [[] for _ in range(env_num)]
        self._max_frames = max_frames
        self._recording: dict[int, _Video] = {}
        self._videos: list[_Video] = []

    @property
    def unfinished(self) -> list[int]:
        """The envs that have not played their share yet."""
        pairs = enumerate(zip(self._returns, self._shares, strict=True))
        return [env for env, (returns, share) in pairs if len(returns) < share]

    def is_finished(self) -> bool:
        """Return whether all envs have played their share."""
        return not self.unfinished

    def update_info(self, env_id: int, info: Mapping[str, Any]) -> None:
        """Add the last info of an episode, a copy of it."""
        if len(self._infos[env_id]) < self._shares[env_id]:
            self._infos[env_id].append({key: _kept(value) for key, value in info.items()})

    def update_reward(self, env_id: int, reward: Any) -> None:
        """Add the return of an episode that ended."""
        if len(self._returns[env_id]) >= self._shares[env_id]:
            return
        self._returns[env_id].append(float(reward))
        video = self._recording.pop(env_id, None)
        if video is not None:
            video.episode_return = float(reward)
            self._videos.append(video)

    def get_episode_return(self) -> list[float]:
        """Return the returns of all episodes so far, env by env."""
        return [value for returns in self._returns for value in returns]

    def get_latest_reward(self, env_id: int) -> float:
        """Return the return of an env's latest episode.

        Raises:
            ValueError: if it has none yet.
        """
        if not self._returns[env_id]:
            raise ValueError(f"env {env_id} has not finished an episode yet")
        return self._returns[env_id][-1]

    def get_current_episode(self) -> int:
        """Return how many episodes have ended."""
        return sum(map(len, self._returns))

    def get_episode_info(self) -> dict[str, Any] | None:
        """Return the last infos: a list per key, and the mean of numbers as ``<key>_mean``.

        Returns:
            None before the first episode has ended.
        """
        if not any(self._infos):
            return None
        means = {f"{key}_mean": mean for key, mean in self.mean_info().items()}
        return {**self._info_lists(), **means}

    def mean_info(self) -> dict[str, float]:
        """Return the mean of each number in the last infos, over the episodes that have it.

        A key whose values are not all numbers is left out; of a success only those values are.
        """
        means = {}
        for key, values in self._info_lists().items():
            if key in SUCCESS_KEYS:
                values = [value for value in values if share_of(value) is not None]
            if values and all(isinstance(value, float) for value in values):
                means[key] = float(np.mean(values))
        return means

    def _info_lists(self) -> dict[str, list[Any]]:
        lists: dict[str, list[Any]] = {}
        for infos in self._infos:
            for info in infos:
                for key, value in info.items():
                    lists.setdefault(key, []).append(value)
        return lists

    def is_recorded(self, env_id: int) -> bool:
        """Return whether the env's current episode counts and its video is not full yet."""
        if len(self._returns[env_id]) >= self._shares[env_id]:
            return False
        video = self._recording.get(env_id)
        return self._max_frames is None or video is None or len(video.frames) < self._max_frames

    def update_video(self, imgs: Mapping[int, Frame]) -> None:
        """Add one frame of some envs, ``[H, W, C] uint8``."""
        for env_id, frame in imgs.items():
            if self.is_recorded(env_id):
                self._recording.setdefault(env_id, _Video()).add(frame)

    def drop_video(self, env_id: int) -> None:
        """Drop the frames of an env's current episode, which has no end."""
        self._recording.pop(env_id, None)

    @property
    def has_video(self) -> bool:
        """Whether any episode was recorded to its end."""
        return bool(self._videos)

    def get_video(self) -> npt.NDArray[np.uint8]:
        """Return videos of the worst, the median (or both medians), and the best episode.

        Returns:
            ``[N, T, C, H, W] uint8``, worst first; shorter videos repeat their last frame, and
            smaller frames are padded with black.

        Raises:
            ValueError: if no episode was recorded to its end.
        """
        if not self._videos:
            raise ValueError("no episode was recorded to its end; call update_video at each step")
        videos = sorted(self._videos, key=lambda video: video.episode_return)
        last = len(videos) - 1
        chosen = [videos[i] for i in sorted({0, last // 2, (last + 1) // 2, last})]
        size = tuple(np.max([video.size for video in chosen], axis=0).tolist())
        decoded = [video.decode(size) for video in chosen]
        length = max(map(len, decoded))
        padded = [
            np.concatenate([video, np.repeat(video[-1:], length - len(video), axis=0)])
            for video in decoded
        ]
        return np.stack(padded).transpose(0, 1, 4, 2, 3)


def evaluate_episodes(
    policy: HasModes | EvalMode,
    env_manager: BaseEnvManager,
    n_episode: int,
    *,
    policy_kwargs: Mapping[str, Any] | None = None,
    max_frames: int = 0,
) -> VectorEvalMonitor:
    """Play whole episodes greedily in all envs at once, a fixed share of them in each env.

    All envs start new episodes. An env that has played its share pauses, if the manager can step
    the others without it. If an env fails, its episode does not count and it plays another.

    An episode that does not end is reported: a warning is logged after 5,000 steps, and again each
    time that it is twice as long. After 1,000,000 steps it is an error. Give envs that may never
    end a ``gymnasium.wrappers.TimeLimit``.

    Args:
        policy: a policy or its eval mode.
        env_manager: the envs; launched if they are closed, and left open.
        n_episode: number of episodes, at least one per env.
        policy_kwargs: passed to the policy's forward.
        max_frames: record each episode, up to its last state, with at most this many frames; 0: no
            videos. The envs must be made with ``render_mode="rgb_array"``. What ``render()``
            returns may have any of the forms of an image; if it is none, it is left out of the
            videos, with a warning.

    Returns:
        The monitor, with returns and infos of all episodes.

    Raises:
        ConfigError: if there are fewer episodes than envs, or an argument has the wrong type.
        PolicyOutputError: if the policy does not return one row per env, with ``action``.
        SpaceError: if the policy's model does not fit the envs' spaces.
        EnvCrashed: if an env keeps failing.
        EnvTimeout: if an episode has not ended after 1,000,000 steps.
    """
    stepper = Stepper(as_eval_mode(policy, user=_USER), env_manager, user=_USER)
    monitor = VectorEvalMonitor(env_manager.env_num, n_episode, max_frames=max_frames)
    stepper.reset()
    kwargs = policy_kwargs or {}
    playing: list[int] = monitor.unfinished
    watch = EpisodeWatch(env_manager, user="the evaluation")
    camera = _Camera(env_manager, monitor) if max_frames else None
    while playing:
        if camera is not None:
            camera.record(playing)
        everyone = len(playing) == env_manager.env_num
        step = stepper.step(kwargs, only=None if everyone else np.array(playing))
        if step.ended:
            for row in np.flatnonzero(step.timestep.done).tolist():
                env_id = int(step.timestep.env_id[row])
                info = step.timestep.info.row(row)
                if camera is not None:
                    camera.record_end(env_id)
                monitor.update_info(env_id, info)
                monitor.update_reward(env_id, info["eval_episode_return"])
            playing = monitor.unfinished
        if not step.timestep.is_full:
            # What these envs have shown does not belong to the episode that they begin.
            for env_id in step.timestep.env_id[~step.timestep.valid].tolist():
                monitor.drop_video(env_id)
        watch.check(playing)
    if camera is not None:
        env_manager.keep_last_frames(())
    return monitor


class _Camera:
    """Records what envs show; what they show in no form of an image is left out, with a warning."""

    def __init__(self, env_manager: BaseEnvManager, monitor: VectorEvalMonitor) -> None:
        self._envs = env_manager
        self._monitor = monitor
        self._recorded: list[int] = []

    def record(self, playing: Sequence[int]) -> None:
        """Record the states of the episodes that count, from which the next step begins."""
        recorded = [env_id for env_id in playing if self._monitor.is_recorded(env_id)]
        if recorded:
            try:
                frames = self._envs.render(recorded)
            except EnvStateError as error:
                self._warn(error)
            else:
                self._monitor.update_video(dict(zip(recorded, frames, strict=True)))
            recorded = [env_id for env_id in recorded if self._monitor.is_recorded(env_id)]
        self._envs.keep_last_frames(recorded)
        self._recorded = recorded

    def record_end(self, env_id: int) -> None:
        """Record the last state of an episode."""
        if env_id in self._recorded:
            try:
                frame = self._envs.last_frame(env_id)
            except EnvStateError as error:
                self._warn(error)
            else:
                self._monitor.update_video({} if frame is None else {env_id: frame})

    def _warn(self, error: EnvStateError) -> None:
        self._envs.warn_once("render", "videos of episodes lack images: %s", error)


def _kept(value: Any) -> Any:
    """Return a number as a float, and a copy of everything that an env may fill again."""
    number = as_number(value)
    return own_copy(value) if number is None else number
