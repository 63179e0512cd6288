"""Envs of bsuite and dm_control, which have the interface of dm_env, as dizoo makes them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, Final

import gymnasium as gym
import numpy as np

from dmiddleware.errors import ConfigError
from dmiddleware.worker.dizoo_wrappers import Env, ScaledActions, no_such_env, optional_module

__all__ = ["DmEnv", "bsuite_env", "dm_control_env"]

_N_SEEDS: Final = 2**32
"""The seeds of the old generator of NumPy, which these envs have, are smaller."""

_TASKS: Final = (
    "ball_in_cup/catch", "cartpole/balance", "cartpole/swingup", "cheetah/run", "finger/spin",
    "reacher/easy", "walker/walk",
)  # fmt: skip
_BOUNDS: Final = {"minimum": -np.inf, "maximum": np.inf}
_GRAY: Final = np.array([0.299, 0.587, 0.114], np.float32)


class DmEnv(gym.Env[Any, Any]):
    """An env of dm_env.

    An action is repeated for ``n_repeats`` steps, and their rewards are summed. An episode that
    ends with a discount of 0 is terminated, and others are truncated.

    Args:
        make: makes the env with a seed; None: the env's own seed.
        observe: returns the observation of an env of dm_env and its time step.
        observation_space: the space of what ``observe`` returns.
        action_space: the space of the actions, as the env takes them.
        n_repeats: steps for each action.
        render: returns an image ``[H, W, 3] uint8`` of an env of dm_env; None: there are none.
        render_mode: None, or ``"rgb_array"`` for images.
    """

    def __init__(
        self,
        make: Callable[[int | None], Any],
        observe: Callable[[Any, Any], Any],
        *,
        observation_space: gym.Space[Any],
        action_space: gym.Space[Any],
        n_repeats: int = 1,
        render: Callable[[Any], Any] | None = None,
        render_mode: str | None = None,
    ) -> None:
        self.metadata = {"render_modes": [] if render is None else ["rgb_array"]}
        self.render_mode = render_mode
        self.observation_space, self.action_space = observation_space, action_space
        self._make, self._observe, self._render = make, observe, render
        self._n_repeats = n_repeats
        self._env: Any = None

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Start an episode; an env with another seed is another env of dm_env."""
        super().reset(seed=seed)
        if self._env is None or seed is not None:
            self.close()
            self._env = self._make(seed)
        return self._observe(self._env, self._env.reset()), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Take an action ``n_repeats`` times, or until the episode ends."""
        total = 0.0
        for _ in range(self._n_repeats):
            step = self._env.step(action)
            total += float(step.reward or 0.0)
            if step.last():
                break
        is_over, is_terminal = bool(step.last()), step.discount == 0
        obs = self._observe(self._env, step)
        return obs, total, is_over and is_terminal, is_over and not is_terminal, {}

    def render(self) -> Any:
        """Return an image, if the env was made with ``render_mode="rgb_array"``."""
        return None if self._render is None or not self.render_mode else self._render(self._env)

    def close(self) -> None:
        """Close the env."""
        if self._env is not None:
            self._env.close()
            self._env = None


def bsuite_env(options: Mapping[str, Any], is_train: bool, **kwargs: Any) -> Env:
    """Make an experiment of bsuite.

    A leading axis of length 1 of its observations is left out.

    Args:
        options: ``env_id``, such as ``"memory_len/0"``.
        is_train: no effect.
        kwargs: passed to :class:`DmEnv`.

    Raises:
        ConfigError: if bsuite is not installed, or has no such experiment.
    """
    id = str(options["env_id"])
    package = optional_module("bsuite.bsuite", "bsuite", f"bsuite's {id}")
    settings = optional_module("bsuite.sweep", "bsuite", id).SETTINGS
    name = id.partition("/")[0]
    if id not in settings:
        raise no_such_env("bsuite", id, sorted(key for key in settings if key.endswith("/0")))
    loader = package.EXPERIMENT_NAME_TO_ENVIRONMENT[name]
    takes_seed = "seed" in inspect.signature(loader).parameters

    def make(seed: int | None) -> Any:
        extra = {} if seed is None or not takes_seed else {"seed": seed % _N_SEEDS}
        return package.load(name, {**settings[id], **extra})

    env = make(None)
    spec = env.observation_spec()
    shape = spec.shape[1:] if spec.shape[:1] == (1,) else spec.shape
    low, high = (float(getattr(spec, key, bound)) for key, bound in _BOUNDS.items())
    return DmEnv(
        make,
        lambda env, step: np.asarray(step.observation, np.float32).reshape(shape),
        observation_space=gym.spaces.Box(low, high, shape, np.float32),
        action_space=gym.spaces.Discrete(int(env.action_spec().num_values)),
        **kwargs,
    )


def dm_control_env(options: Mapping[str, Any], is_train: bool, **kwargs: Any) -> Env:
    """Make a task of the suite of dm_control as dmc2gym does, in the wrappers of dizoo.

    Observations are the parts of the state in a row, or pictures. Actions are in [-1, 1].

    Args:
        options: ``domain_name`` and ``task_name``; ``frame_skip`` and ``action_repeat``, which
            repeat actions; ``from_pixels``, with ``height``, ``width`` and ``channels_first``;
            ``warp_frame`` for gray pictures, ``scale``, ``clip_rewards``, ``frame_stack``.
        is_train: no effect.
        kwargs: passed to :class:`DmEnv`.

    Raises:
        ConfigError: if dm_control is not installed, dizoo has no such task, or the options exclude
            each other.
    """
    domain, task = str(options["domain_name"]), str(options["task_name"])
    if f"{domain}/{task}" not in _TASKS:
        raise no_such_env("dmc2gym", f"{domain}/{task}", _TASKS, "domain_name/task_name")
    _check(options)
    suite = optional_module("dm_control.suite", "dm-control", f"dm_control's {domain} {task}")

    def make(seed: int | None) -> Any:
        return suite.load(domain, task, {"random": 1 if seed is None else seed % _N_SEEDS})

    is_image, frame = bool(options["from_pixels"]), _frames(options)

    def picture(env: Any) -> Any:
        try:
            return env.physics.render(int(options["height"]), int(options["width"]), camera_id=0)
        except Exception as error:  # whatever OpenGL raises
            raise ConfigError(
                f"dm_control cannot draw {domain} {task}: {error}; without a display, set the "
                "environment variable MUJOCO_GL to egl or osmesa, or set env.from_pixels=False"
            ) from error

    def observe(env: Any, step: Any) -> Any:
        if is_image:
            return frame(picture(env))
        parts = [np.ravel(part) for part in step.observation.values()]
        return np.concatenate(parts).astype(np.float32)

    env = make(None)
    actions, first = env.action_spec(), observe(env, env.reset())
    low, high = (0, 255) if is_image else (-np.inf, np.inf)
    wrapped: Env = DmEnv(
        make,
        observe,
        observation_space=gym.spaces.Box(low, high, first.shape, first.dtype.type),
        action_space=gym.spaces.Box(
            actions.minimum.astype(np.float32), actions.maximum.astype(np.float32)
        ),
        n_repeats=int(options["frame_skip"]) * int(options["action_repeat"]),
        render=picture,
        **kwargs,
    )
    wrapped = ScaledActions(wrapped)
    if options["clip_rewards"]:
        wrapped = gym.wrappers.TransformReward(
            wrapped, lambda reward: float(np.sign(float(reward)))
        )
    n_frames = int(options["frame_stack"])
    return gym.wrappers.FrameStackObservation(wrapped, n_frames) if n_frames > 1 else wrapped


def _check(options: Mapping[str, Any]) -> None:
    """Refuse options that exclude each other, or that change pictures in a way that is not here."""
    if not options["from_pixels"]:
        for key in ("warp_frame", "scale"):
            if options[key]:
                raise ConfigError(
                    f"env.{key} is for pictures; set env.from_pixels, or leave it out"
                )
    sizes = (options["height"], options["width"])
    if options["warp_frame"] and sizes != (options["resize"], options["resize"]):
        raise ConfigError(
            f"env.warp_frame cannot resize pictures of {sizes[0]} x {sizes[1]} pixels here; set "
            f"env.height and env.width to env.resize={options['resize']}"
        )
    if options["clip_rewards"] and int(options["action_repeat"]) > 1:
        raise ConfigError(
            "env.clip_rewards with env.action_repeat clips each of the rewards that are summed; "
            "repeat actions with env.frame_skip, or leave one of them out"
        )


def _frames(options: Mapping[str, Any]) -> Callable[[Any], Any]:
    """Return the function that makes an observation of a picture ``[H, W, 3] uint8``.

    Networks scale bytes to [0, 1], so ``scale`` leaves them as they are; other pictures are floats.
    """
    is_gray = options["warp_frame"] and not options["channels_first"]

    def frame(picture: Any) -> Any:
        if is_gray:
            picture = np.rint(picture @ _GRAY).astype(np.uint8)
        elif options["channels_first"]:
            picture = picture.transpose(2, 0, 1)
        return picture.astype(np.uint8 if options["scale"] else np.float32)

    return frame
