"""Checks that an env follows Gymnasium's interface."""

from __future__ import annotations

import logging
import sys
import traceback
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any, Final, Protocol

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from dmiddleware.errors import DMiddlewareError, EnvProtocolError

__all__ = [
    "check_env",
    "check_same_spaces",
    "check_result",
    "check_first",
    "check_flag",
    "check_info",
    "contract_break",
    "bad_obs",
    "MISFITS",
    "what_instead",
    "close_quietly",
]

logger = logging.getLogger(__name__)

MISFITS: Final = (
    AttributeError,
    IndexError,
    KeyError,
    OverflowError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""What reading something of another structure than expected raises."""

# Where they are raised, such errors say what an env returned or takes, not that it crashed.
# Gymnasium's async vector env is left out: it raises what its envs have raised.
_CALLERS: Final = (
    "gymnasium.core",
    "gymnasium.wrappers.",
    "gymnasium.utils.passive_env_checker",
    "gymnasium.vector.sync_vector_env",
    "gymnasium.vector.utils.",
    "gymnasium.vector.vector_env",
    "dmiddleware.env.",
)
_CALLED_BY_ALL: Final = ("numpy", "functools")


class Closable(Protocol):
    """An env or a vector env."""

    def close(self) -> None:
        """Release its resources."""


def check_env(env: Any, index: int) -> None:
    """Reject an env that lacks a part of Gymnasium's interface.

    Raises:
        EnvProtocolError: naming what is missing.
    """
    instead = what_instead(env)
    if instead:
        raise EnvProtocolError(f"env {index} is {instead}")
    for name in ("reset", "step", "close"):
        if not callable(getattr(env, name, None)):
            raise EnvProtocolError(
                f"env {index} is a {type(env).__name__} without a method {name}(); an env factory "
                "returns a gymnasium.Env"
            )
    for name in ("observation_space", "action_space"):
        try:
            space = getattr(env, name, None)
        except Exception as error:
            raise EnvProtocolError(
                f"env {index} ({type(env).__name__}) has no {name}: {type(error).__name__}: {error}"
            ) from error
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


def what_instead(env: Any) -> str:
    """Describe what was given in place of a Gymnasium env, and say what to do; empty: unknown."""
    name = env.__name__ if isinstance(env, type | ModuleType) else type(env).__name__
    if env is None:
        return "None; does the function or wrapper that makes it lack a return statement?"
    if isinstance(env, str):
        return f"the string {env!r}; make_env_manager takes the id of an env itself"
    if isinstance(env, type):
        return f"the class {name}, not an object of it; call it, as in {name}()"
    if isinstance(env, ModuleType):
        return f"the module {name}; pass a function in it that makes an env, such as parallel_env"
    if isinstance(env, gym.vector.VectorEnv):
        return (
            f"a vector env ({name}), which has several envs; pass mode='vector' to "
            "make_env_manager, with its number of envs as env_num"
        )
    return _foreign(env, name)


def _foreign(env: Any, name: str) -> str:
    """Describe an env of another interface than Gymnasium's."""
    pettingzoo = sys.modules.get("pettingzoo")
    if pettingzoo is not None and isinstance(env, pettingzoo.AECEnv):
        return (
            f"a PettingZoo env whose agents take turns ({name}); make_game makes it a game of "
            "teams. PettingZooAdapter makes it a game, and OpponentEnv(PettingZooAdapter(env)) an "
            "env of one player. "
            "BattleEnvManager steps games with a policy for every player"
        )
    if pettingzoo is not None and isinstance(env, pettingzoo.ParallelEnv):
        return f"a PettingZoo parallel env ({name}); wrap it in ParallelEnvAdapter"
    if not isinstance(env, gym.Env) and callable(getattr(env, "to_move", None)):
        return f"a game of several players ({name}); wrap it in OpponentEnv"
    if any(base.__module__.partition(".")[0] == "gym" for base in type(env).__mro__):
        return (
            f"an env of the old Gym package ({name}); wrap it in shimmy's GymV26CompatibilityV0, "
            "or in GymV21CompatibilityV0 if its step() returns four values"
        )
    if callable(getattr(env, "action_spec", None)):
        return f"a dm_env environment ({name}); wrap it in shimmy's DmControlCompatibilityV0"
    return ""


def contract_break(env: str, doing: str, error: Exception) -> EnvProtocolError | None:
    """Return the error for an env that does not follow the interface, or None: it has crashed.

    Where an env returns something else than Gymnasium's wrappers expect, or takes other arguments,
    they raise errors that look like those of a crash. A restart would not help.

    Args:
        env: the env's name in the message, such as "env 3".
        doing: the operation ("step", "reset").
        error: what was raised.
    """
    if not isinstance(error, (AssertionError, *MISFITS)) or isinstance(error, DMiddlewareError):
        return None
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    modules = [str(frame.f_globals.get("__name__")) for frame in frames]
    where = next((module for module in modules[::-1] if not module.startswith(_CALLED_BY_ALL)), "")
    if not where.startswith(_CALLERS):
        return None
    return EnvProtocolError(
        f"{env} does not follow the interface of environments. In {doing}, {where} raised "
        f"{type(error).__name__}: {error}. reset() takes the keywords seed and options, and "
        "returns (obs, info); step(action) returns (obs, reward, terminated, truncated, info)"
    )


def check_same_spaces(
    found: Sequence[tuple[spaces.Space[Any], spaces.Space[Any]]],
) -> None:
    """Reject envs whose (observation, action) spaces differ.

    Raises:
        EnvProtocolError: with the first difference.
    """
    for pair in found:
        for name, first, space in zip(("observation", "action"), found[0], pair, strict=True):
            if space != first:
                raise EnvProtocolError(
                    f"the envs of one manager must have the same spaces, but the {name} space of "
                    f"one is {space} and that of another is {first}"
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
        expected = f"{reward_shape[0]} numbers, one per agent" if reward_shape else "one number"
        raise EnvProtocolError(
            f"env {env_id} returned the reward {_short(result[1])}; it must be {expected}"
        )
    for name, flag in (("terminated", result[2]), ("truncated", result[3])):
        check_flag(flag, name, env_id)
    check_info(result[4], env_id)


def check_info(info: Any, env_id: int) -> None:
    """Reject an info that is not a dictionary.

    Raises:
        EnvProtocolError: with what was returned.
    """
    if not isinstance(info, Mapping):
        raise EnvProtocolError(
            f"env {env_id} returned the info {_short(info)}; it must be a dictionary, which may be "
            "empty"
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


def check_first(result: Any, env_id: int) -> None:
    """Reject what a reset returned if it is not (obs, info).

    Raises:
        EnvProtocolError: with what was returned.
    """
    if not isinstance(result, tuple) or len(result) != 2 or not isinstance(result[1], Mapping):
        raise EnvProtocolError(
            f"env {env_id} returned {_short(result)} from reset(); it must return (obs, info), "
            "with a dictionary for info"
        )


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


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 120 else f"{text[:117]}…"
