"""Checks that an env follows Gymnasium's interface, and the errors if it does not."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import gymnasium as gym
import numpy as np
import numpy.typing as npt
from gymnasium import spaces

from dmiddleware.errors import EnvProtocolError, EnvStateError

__all__ = [
    "check_env",
    "check_same_spaces",
    "check_result",
    "check_first",
    "check_flag",
    "bad_obs",
    "as_frame",
    "close_quietly",
]

logger = logging.getLogger(__name__)


class Closable(Protocol):
    """An env or a vector env."""

    def close(self) -> None:
        """Release its resources."""


def check_env(env: Any, index: int) -> None:
    """Reject an env that lacks a part of Gymnasium's interface.

    Raises:
        EnvProtocolError: naming what is missing.
    """
    for name in ("reset", "step", "close"):
        if not callable(getattr(env, name, None)):
            raise EnvProtocolError(
                f"env {index} is a {type(env).__name__} without a method {name}(); an env factory "
                "returns a gymnasium.Env"
            )
    for name in ("observation_space", "action_space"):
        space = getattr(env, name, None)
        if not isinstance(space, spaces.Space):
            raise EnvProtocolError(
                f"env {index} ({type(env).__name__}) has {name} = {space!r}; it must be a "
                "gymnasium.spaces.Space"
            )
    if not isinstance(env, gym.Env):
        raise EnvProtocolError(
            f"env {index} is a {type(env).__name__}, not a gymnasium.Env; derive its class from "
            "gymnasium.Env"
        )


def check_same_spaces(
    found: Sequence[tuple[spaces.Space[Any], spaces.Space[Any]]],
) -> None:
    """Reject envs whose (observation, action) spaces differ.

    Raises:
        EnvProtocolError: with the first difference.
    """
    for pair in found:
        for name, first, own in zip(("observation", "action"), found[0], pair, strict=True):
            if own != first:
                raise EnvProtocolError(
                    f"the envs of one manager must have the same spaces, but the {name} space of "
                    f"one is {own} and that of another is {first}"
                )


def check_result(result: Any, env_id: int, reward_shape: tuple[int, ...] = ()) -> None:
    """Reject what a step returned if it is not (obs, reward, terminated, truncated, info).

    Args:
        result: what it returned.
        env_id: the env.
        reward_shape: the shape of a reward, ``()``, or ``(A,)`` for several agents.

    Raises:
        EnvProtocolError: with what was returned.
    """
    if not isinstance(result, tuple) or len(result) != 5:
        raise EnvProtocolError(
            f"env {env_id} returned {_short(result)} from step(); it must return (obs, reward, "
            "terminated, truncated, info). An env of the old Gym interface needs shimmy's "
            "GymV21CompatibilityV0 around it"
        )
    reward = np.asarray(result[1])
    if reward.shape != reward_shape or reward.dtype.kind not in "iufb":
        wanted = f"{reward_shape[0]} numbers, one per agent" if reward_shape else "one number"
        raise EnvProtocolError(
            f"env {env_id} returned the reward {_short(result[1])}; it must be {wanted}"
        )
    for name, flag in (("terminated", result[2]), ("truncated", result[3])):
        check_flag(flag, name, env_id)
    if not isinstance(result[4], Mapping):
        raise EnvProtocolError(
            f"env {env_id} returned the info {_short(result[4])}; it must be a dictionary"
        )


def check_flag(flag: Any, name: str, env_id: int) -> None:
    """Reject a ``terminated`` or ``truncated`` that is not one boolean (or number).

    Raises:
        EnvProtocolError: with what was returned.
    """
    if type(flag) is bool or type(flag) is np.bool_:
        return
    array = np.asarray(flag)
    if array.shape or array.dtype.kind not in "biuf":
        raise EnvProtocolError(f"env {env_id} returned {name}={_short(flag)}; it must be one bool")


def check_first(result: Any, env_id: int) -> tuple[Any, Any]:
    """Return what a reset returned, or reject it if it is not (obs, info).

    Raises:
        EnvProtocolError: with what was returned.
    """
    if type(result) is tuple and len(result) == 2 and type(result[1]) is dict:
        return result  # the usual case; an isinstance check with Mapping is much slower
    if not isinstance(result, tuple) or len(result) != 2 or not isinstance(result[1], Mapping):
        raise EnvProtocolError(
            f"env {env_id} returned {_short(result)} from reset(); it must return (obs, info), "
            "with a dictionary for info"
        )
    return result


def bad_obs(env_id: int, obs: Any, space: spaces.Space[Any], error: Exception) -> EnvProtocolError:
    """Return the error for an observation that does not fit its space."""
    return EnvProtocolError(
        f"env {env_id} returned an observation that does not fit its observation space {space}: "
        f"{type(error).__name__}: {error}. The observation: {_short(obs)}"
    )


def close_quietly(env: Closable) -> None:
    """Close an env, and log what it raises instead of raising it."""
    try:
        env.close()
    except Exception:
        logger.warning("an env raised while it was closed", exc_info=True)


def as_frame(frame: Any, render_mode: str | None) -> npt.NDArray[np.uint8]:
    """Check and return the result of ``env.render()``.

    Raises:
        EnvStateError: if it is not an image because the env was made with another render mode.
    """
    if not isinstance(frame, np.ndarray) or frame.ndim != 3:
        raise EnvStateError(
            f"render() returned no image: the env was made with render_mode={render_mode!r}; pass "
            'env_kwargs={"render_mode": "rgb_array"}'
        )
    return frame.astype(np.uint8, copy=False)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 120 else f"{text[:117]}…"
