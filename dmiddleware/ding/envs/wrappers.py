"""The face of ``ding.envs.env_wrappers``: wrappers by the old rules, and their configs."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import torch
from gymnasium import spaces
from torch.nn.functional import interpolate

from dmiddleware.ding.gym.core import ObservationWrapper, RewardWrapper, Wrapper
from dmiddleware.ding.gym.wrappers import TimeLimit
from dmiddleware.ding.registries import ENV_WRAPPER_REGISTRY
from dmiddleware.errors import ConfigError
from dmiddleware.registry import import_modules

__all__ = [
    "ActionRepeatWrapper",
    "AllinObsWrapper",
    "ClipRewardWrapper",
    "DelayRewardWrapper",
    "EpisodicLifeWrapper",
    "EvalEpisodeReturnWrapper",
    "FireResetWrapper",
    "FlatObsWrapper",
    "FrameStackWrapper",
    "GymHybridDictActionWrapper",
    "GymToGymnasiumWrapper",
    "MaxAndSkipWrapper",
    "NoopResetWrapper",
    "ObsNormWrapper",
    "ObsPlusPrevActRewWrapper",
    "ObsTransposeWrapper",
    "RamWrapper",
    "RewardNormWrapper",
    "RunningMeanStd",
    "ScaledFloatFrameWrapper",
    "StaticObsNormWrapper",
    "TimeLimitWrapper",
    "TransposeWrapper",
    "WarpFrameWrapper",
    "create_env_wrapper",
    "update_shape",
]

_register: Final = ENV_WRAPPER_REGISTRY.register
_SETTLED: Final = 30
"""Steps after which running statistics are used."""

Step = tuple[Any, Any, bool, dict[str, Any]]


@_register("noop_reset")
class NoopResetWrapper(Wrapper):
    """Starts an episode with 1 to ``noop_max`` steps of action 0."""

    def __init__(self, env: Any, noop_max: int = 30) -> None:
        super().__init__(env)
        self.noop_max = noop_max

    def reset(self, **options: Any) -> Any:
        """Return the observation after the steps."""
        obs = self.env.reset(**options)
        for _ in range(int(np.random.randint(1, self.noop_max + 1))):
            obs, _, done, _ = self.env.step(0)
            if done:
                obs = self.env.reset(**options)
        return obs


@_register("max_and_skip")
class MaxAndSkipWrapper(Wrapper):
    """Repeats an action, and returns the maximum of the last two frames."""

    def __init__(self, env: Any, skip: int = 4) -> None:
        super().__init__(env)
        self.skip = skip

    def step(self, action: Any) -> Step:
        """Return the maximum, and the sum of the rewards."""
        frames: deque[Any] = deque(maxlen=2)
        total, done, info = 0.0, False, {}
        for _ in range(self.skip):
            obs, reward, done, info = self.env.step(action)
            frames.append(obs)
            total += reward
            if done:
                break
        return np.maximum.reduce(list(frames)), total, done, info


@_register("warp_frame")
class WarpFrameWrapper(ObservationWrapper):
    """Turns frames ``[H, W, 3]`` to gray ones of ``[size, size] uint8``."""

    def __init__(self, env: Any, size: int = 84, dict_space_key: str | None = None) -> None:
        super().__init__(env)
        self.size = size
        self.key = dict_space_key
        frame = spaces.Box(0, 255, (size, size), np.uint8)
        if dict_space_key is None:
            self.observation_space = frame
        else:
            parts = dict(env.observation_space.spaces)
            self.observation_space = spaces.Dict({**parts, dict_space_key: frame})

    def observation(self, observation: Any) -> Any:
        """Return the small gray frame."""
        if self.key is not None:
            return {**observation, self.key: self._warped(observation[self.key])}
        return self._warped(observation)

    def _warped(self, frame: Any) -> Any:
        gray = torch.as_tensor(np.asarray(frame)[..., :3]).float() @ torch.tensor(
            [0.299, 0.587, 0.114]
        )
        small = interpolate(gray[None, None], (self.size, self.size), mode="area")
        return small[0, 0].round().to(torch.uint8).numpy()


@_register("scaled_float_frame")
class ScaledFloatFrameWrapper(ObservationWrapper):
    """Scales observations from their bounds to [0, 1], float32."""

    def __init__(self, env: Any) -> None:
        super().__init__(env)
        low, high = np.min(env.observation_space.low), np.max(env.observation_space.high)
        self.bias, self.scale = low, high - low
        self.observation_space = spaces.Box(0.0, 1.0, env.observation_space.shape, np.float32)

    def observation(self, observation: Any) -> Any:
        """Return the scaled observation."""
        return ((np.asarray(observation) - self.bias) / self.scale).astype(np.float32)


@_register("clip_reward")
class ClipRewardWrapper(RewardWrapper):
    """Replaces each reward by its sign."""

    reward_range = (-1, 1)

    def reward(self, reward: Any) -> Any:
        """Return the sign."""
        return np.sign(reward)


@_register("action_repeat")
class ActionRepeatWrapper(Wrapper):
    """Repeats an action, and sums the rewards."""

    def __init__(self, env: Any, action_repeat: int = 1) -> None:
        super().__init__(env)
        self.action_repeat = action_repeat

    def step(self, action: Any) -> Step:
        """Return what the last of the steps returned, with the sum."""
        total = 0.0
        for _ in range(self.action_repeat):
            obs, reward, done, info = self.env.step(action)
            total += reward
            if done:
                break
        return obs, total, done, info


@_register("delay_reward")
class DelayRewardWrapper(Wrapper):
    """Returns the sum of the rewards of every ``delay_reward_step`` steps at their end."""

    def __init__(self, env: Any, delay_reward_step: int = 0) -> None:
        super().__init__(env)
        self._every = delay_reward_step
        self._n_steps, self._sum = 0, 0.0

    def reset(self, **options: Any) -> Any:
        """Start an episode."""
        self._n_steps, self._sum = 0, 0.0
        return self.env.reset(**options)

    def step(self, action: Any) -> Step:
        """Return the sum where it is due, else 0."""
        obs, reward, done, info = self.env.step(action)
        if self._every <= 1:
            return obs, reward, done, info
        self._sum += reward
        self._n_steps += 1
        if not done and self._n_steps % self._every:
            return obs, 0.0, done, info
        due, self._sum = self._sum, 0.0
        return obs, due, done, info


@_register("eval_episode_return")
class EvalEpisodeReturnWrapper(Wrapper):
    """Puts the sum of an episode's rewards into ``info["eval_episode_return"]`` at its end."""

    def __init__(self, env: Any) -> None:
        super().__init__(env)
        self._return = 0.0

    def reset(self, **options: Any) -> Any:
        """Start an episode."""
        self._return = 0.0
        return self.env.reset(**options)

    def step(self, action: Any) -> Step:
        """Add the reward."""
        obs, reward, done, info = self.env.step(action)
        self._return += reward
        if done:
            info["eval_episode_return"] = np.asarray([self._return], np.float32)
        return obs, reward, done, info


@_register("frame_stack")
class FrameStackWrapper(Wrapper):
    """Stacks the last ``n_frames`` observations along a new first dimension.

    An observation of one dimension is a row of the stack, and one channel is dropped.
    """

    def __init__(self, env: Any, n_frames: int = 4) -> None:
        super().__init__(env)
        self.n_frames = n_frames
        self.frames: deque[Any] = deque(maxlen=n_frames)
        space = env.observation_space
        self._is_team = isinstance(space, list | tuple | spaces.Tuple)
        if not self._is_team:
            shape = (n_frames, *space.shape)
            low, high = np.min(space.low), np.max(space.high)
            self.observation_space = spaces.Box(low, high, shape, space.dtype)

    def reset(self, **options: Any) -> Any:
        """Fill the stack with the first observation."""
        obs = self.env.reset(**options)
        self.frames.extend([obs] * self.n_frames)
        return self._stack()

    def step(self, action: Any) -> Step:
        """Add the observation."""
        obs, reward, done, info = self.env.step(action)
        self.frames.append(obs)
        return self._stack(), reward, done, info

    def _stack(self) -> Any:
        return np.stack(list(self.frames), axis=0)


@_register("obs_transpose")
class ObsTransposeWrapper(ObservationWrapper):
    """Turns images ``[H, W, C]`` to ``[C, H, W]``."""

    def __init__(self, env: Any) -> None:
        super().__init__(env)
        space = env.observation_space
        height, width, channels = space.shape
        low, high = np.min(space.low), np.max(space.high)
        self.observation_space = spaces.Box(low, high, (channels, height, width), space.dtype)

    def observation(self, observation: Any) -> Any:
        """Return the image with the channels first."""
        return np.asarray(observation).transpose(2, 0, 1)


class RunningMeanStd:
    """Mean and standard deviation of all values so far.

    Source: Chan et al., "Updating formulae and a pairwise algorithm for computing sample
    variances", 1979.
    """

    def __init__(self, epsilon: float = 1e-4, shape: tuple[int, ...] = ()) -> None:
        self._epsilon, self._shape = epsilon, shape
        self.reset()

    def reset(self) -> None:
        """Forget all values."""
        self._mean = np.zeros(self._shape, np.float64)
        self._var = np.ones(self._shape, np.float64)
        self._count = self._epsilon

    def update(self, x: Any) -> None:
        """Add values ``[N, …]``, or one value."""
        values = np.asarray(x, np.float64)
        if values.shape == self._shape:
            values = values[None]
        n, total = len(values), self._count + len(values)
        delta = values.mean(0) - self._mean
        sums = self._var * self._count + values.var(0) * n + delta**2 * self._count * n / total
        self._mean = self._mean + delta * n / total
        self._var, self._count = sums / total, total

    @property
    def mean(self) -> Any:
        """The mean."""
        return self._mean

    @property
    def std(self) -> Any:
        """The standard deviation."""
        return np.sqrt(self._var)


class _Normalized(ObservationWrapper):
    clip_range: tuple[float, float] = (-3, 3)

    def observation(self, observation: Any) -> Any:
        normalized = (observation - self.center()) / self.spread()
        return np.clip(normalized, *self.clip_range).astype(np.float32)

    def center(self) -> Any:
        raise NotImplementedError

    def spread(self) -> Any:
        raise NotImplementedError


@_register("obs_norm")
class ObsNormWrapper(_Normalized):
    """Normalizes observations by their running statistics, from the 31st step on."""

    def __init__(self, env: Any) -> None:
        super().__init__(env)
        self.data_count = 0
        self.rms = RunningMeanStd(shape=env.observation_space.shape)

    def center(self) -> Any:
        """The running mean."""
        return self.rms.mean if self.data_count > _SETTLED else 0.0

    def spread(self) -> Any:
        """The running standard deviation."""
        return self.rms.std if self.data_count > _SETTLED else 1.0

    def observation(self, observation: Any) -> Any:
        """Return the normalized observation."""
        if self.data_count <= _SETTLED:
            return observation
        return super().observation(observation)

    def step(self, action: Any) -> Step:
        """Add the observation to the statistics."""
        self.data_count += 1
        obs, reward, done, info = self.env.step(action)
        self.rms.update(obs)
        return self.observation(obs), reward, done, info

    def reset(self, **options: Any) -> Any:
        """Forget the statistics, as DI-engine does."""
        self.data_count = 0
        self.rms.reset()
        obs = self.env.reset(**options)
        self.rms.update(obs)
        return self.observation(obs)


@_register("static_obs_norm")
class StaticObsNormWrapper(_Normalized):
    """Normalizes observations by a given mean and standard deviation."""

    def __init__(self, env: Any, mean: Any, std: Any) -> None:
        super().__init__(env)
        self.mean, self.std = np.asarray(mean), np.asarray(std)

    def center(self) -> Any:
        """The given mean."""
        return self.mean

    def spread(self) -> Any:
        """The given standard deviation."""
        return self.std


@_register("reward_norm")
class RewardNormWrapper(RewardWrapper):
    """Divides rewards by the running standard deviation of the discounted return."""

    def __init__(self, env: Any, reward_discount: float) -> None:
        super().__init__(env)
        self.reward_discount = reward_discount
        self.cum_reward = np.zeros(1)
        self.data_count = 0
        self.rms = RunningMeanStd(shape=(1,))

    def step(self, action: Any) -> Step:
        """Add the reward to the statistics."""
        self.data_count += 1
        obs, reward, done, info = self.env.step(action)
        self.cum_reward = self.cum_reward * self.reward_discount + np.asarray([reward], np.float64)
        self.rms.update(self.cum_reward)
        return obs, self.reward(reward), done, info

    def reward(self, reward: Any) -> Any:
        """Return the scaled reward, from the 31st step on."""
        scale = self.rms.std.item() if self.data_count > _SETTLED else 1.0
        return np.asarray(reward).item() / scale

    def reset(self, **options: Any) -> Any:
        """Forget the statistics, as DI-engine does."""
        self.cum_reward = np.zeros(1)
        self.data_count = 0
        self.rms.reset()
        return self.env.reset(**options)


@_register("ram")
class RamWrapper(Wrapper):
    """Returns the console's memory, 128 bytes, as an image ``[128, 1, 1] float32``."""

    def __init__(self, env: Any, render: bool = False) -> None:
        super().__init__(env)
        self.observation_space = spaces.Box(0, 255, (128, 1, 1), np.float32)

    def reset(self, **options: Any) -> Any:
        """Return the first memory."""
        return np.asarray(self.env.reset(**options)).reshape(128, 1, 1).astype(np.float32)

    def step(self, action: Any) -> Step:
        """Return the memory."""
        obs, reward, done, info = self.env.step(action)
        return np.asarray(obs).reshape(128, 1, 1).astype(np.float32), reward, done, info


@_register("episodic_life")
class EpisodicLifeWrapper(Wrapper):
    """Ends an episode when a life is lost; the game continues in the next episode."""

    def __init__(self, env: Any) -> None:
        super().__init__(env)
        self.lives = 0
        self.was_real_done = True

    def step(self, action: Any) -> Step:
        """Return ``done`` also for a lost life."""
        obs, reward, done, info = self.env.step(action)
        self.was_real_done = done
        lives = self.env.unwrapped.ale.lives()
        if 0 < lives < self.lives:
            done = True
        self.lives = lives
        return obs, reward, done, info

    def reset(self, **options: Any) -> Any:
        """Reset the game if it is over, else take a step of action 0."""
        obs = self.env.reset(**options) if self.was_real_done else self.env.step(0)[0]
        self.lives = self.env.unwrapped.ale.lives()
        return obs


@_register("fire_reset")
class FireResetWrapper(Wrapper):
    """Presses the fire button at the start of an episode."""

    def reset(self, **options: Any) -> Any:
        """Return the observation after it."""
        self.env.reset(**options)
        return self.env.step(1)[0]


@_register("gym_hybrid_dict_action")
class GymHybridDictActionWrapper(Wrapper):
    """Takes hybrid actions as a dictionary, ``action_type`` and ``action_args``."""

    def __init__(self, env: Any) -> None:
        super().__init__(env)
        kind, arguments = env.action_space
        self.action_space = spaces.Dict({"action_type": kind, "action_args": arguments})

    def step(self, action: Any) -> Step:
        """Pass the two parts as a tuple."""
        step: Step = self.env.step((action["action_type"], action["action_args"]))
        return step


@_register("obs_plus_prev_action_reward")
class ObsPlusPrevActRewWrapper(Wrapper):
    """Returns a dictionary: the observation, the action before it and its reward."""

    def __init__(self, env: Any) -> None:
        super().__init__(env)
        self.observation_space = spaces.Dict(
            {
                "obs": env.observation_space,
                "prev_action": env.action_space,
                "prev_reward_extrinsic": spaces.Box(
                    env.reward_range[0], env.reward_range[1], (1,), np.float32
                ),
            }
        )
        self.prev_action: Any = -1
        self.prev_reward_extrinsic: Any = 0

    def reset(self, **options: Any) -> Any:
        """Return the first dictionary; a continued env keeps the action before."""
        return self._with_previous(self.env.reset(**options))

    def step(self, action: Any) -> Step:
        """Return the dictionary with the previous action, and remember this one."""
        obs, reward, done, info = self.env.step(action)
        obs = self._with_previous(obs)
        self.prev_action, self.prev_reward_extrinsic = action, reward
        return obs, reward, done, info

    def _with_previous(self, obs: Any) -> dict[str, Any]:
        return {
            "obs": obs,
            "prev_action": self.prev_action,
            "prev_reward_extrinsic": self.prev_reward_extrinsic,
        }


class TransposeWrapper(ObsTransposeWrapper):
    """Turns images ``[H, W, C]`` to ``[C, H, W]``."""


class TimeLimitWrapper(TimeLimit):
    """Ends an episode after ``max_limit`` steps."""

    def __init__(self, env: Any, max_limit: int) -> None:
        super().__init__(env, max_limit)


class FlatObsWrapper(ObservationWrapper):
    """Flattens MiniGrid's dictionary: the image, then the mission's letters in one-hot form.

    Args:
        env: the env.
        maxStrLen: letters of a mission at most.
    """

    _N_CODES = 28

    def __init__(self, env: Any, maxStrLen: int = 96) -> None:  # noqa: N803 (DI-engine's name)
        super().__init__(env)
        self._length = maxStrLen
        n_pixels = int(np.prod(env.observation_space["image"].shape))
        size = n_pixels + self._N_CODES * maxStrLen
        self.observation_space = spaces.Box(0, 255, (size,), np.uint8)

    def observation(self, observation: Any) -> Any:
        """Return one vector of uint8."""
        letters = np.zeros((self._length, self._N_CODES), np.float32)
        for place, letter in enumerate(str(observation["mission"]).lower()[: self._length]):
            code = ord(letter) - ord("a") if "a" <= letter <= "z" else 26 + (letter == ",")
            letters[place, code] = 1
        return np.concatenate([np.asarray(observation["image"]).ravel(), letters.ravel()])


class GymToGymnasiumWrapper(Wrapper):
    """An env of Gymnasium by the old rules, as every env of this ``gym`` is already."""


@_register("allinobs")
class AllinObsWrapper(Wrapper):
    """Returns a dictionary with the observation and the reward, for decision transformers."""

    def reset(self, **options: Any) -> Any:
        """Return the first observation with a reward of 0."""
        return {"obs": self.env.reset(**options), "reward": np.zeros(1, np.float32)}

    def step(self, action: Any) -> Any:
        """Return a timestep whose observation has the reward."""
        timestep = self.env.step(action)
        obs = {"obs": timestep[0], "reward": timestep[1]}
        if hasattr(timestep, "_replace"):
            return timestep._replace(obs=obs)
        return obs, *timestep[1:]

    def seed(self, seed: int | None = None, dynamic_seed: bool = True) -> Any:
        """Seed the env."""
        return self.env.seed(seed, dynamic_seed)


def update_shape(
    obs_shape: Any, act_shape: Any, rew_shape: Any, wrapper_names: list[str]
) -> tuple[Any, Any, Any]:
    """Return the shapes unchanged: spaces are read from the wrapped envs here."""
    return obs_shape, act_shape, rew_shape


def create_env_wrapper(env: Any, env_wrapper_cfg: Mapping[str, Any]) -> Any:
    """Wrap an env as a config says: ``type``, ``kwargs``, and modules in ``import_names``.

    Raises:
        ConfigError: if the config has no ``type``.
        RegistryError: for an unknown ``type``.
    """
    import_modules(env_wrapper_cfg.get("import_names") or ())
    if "type" not in env_wrapper_cfg:
        raise ConfigError(f"an env wrapper needs a type, got {dict(env_wrapper_cfg)}")
    options = env_wrapper_cfg.get("kwargs") or {}
    return ENV_WRAPPER_REGISTRY.build(env_wrapper_cfg["type"], env, **options)
