"""What is expected of an env, and how a breach of it is told."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt
from gymnasium import spaces

from dmiddleware.env.spaces import Collate
from dmiddleware.env.timestep import IdArray
from dmiddleware.errors import EnvProtocolError, EnvStateError

__all__ = ["check_env", "check_same_spaces", "culprit", "as_frame"]


def check_env(env: Any, index: int) -> None:
    """Refuse an env that lacks a part of Gymnasium's interface.

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
            f"env {index} is a {type(env).__name__}, which is no gymnasium.Env; derive it from "
            "gymnasium.Env"
        )


def check_same_spaces(
    found: Sequence[tuple[spaces.Space[Any], spaces.Space[Any]]],
) -> None:
    """Refuse envs whose (observation, action) spaces differ.

    Raises:
        EnvProtocolError: naming the first env that differs from env 0, and how.
    """
    for index, pair in enumerate(found):
        for name, first, own in zip(("observation", "action"), found[0], pair, strict=True):
            if own != first:
                raise EnvProtocolError(
                    f"the envs of one manager share their spaces, but the {name} space of env "
                    f"{index} is {own} and that of env 0 is {first}"
                )


def culprit(results: Sequence[Any], env_ids: IdArray, collate: Collate) -> EnvProtocolError:
    """Find the env whose step returned something that cannot be used, and say what."""
    for env_id, result in zip(env_ids.tolist(), results, strict=True):
        if not isinstance(result, tuple) or len(result) != 5:
            return EnvProtocolError(
                f"env {env_id} returned {_short(result)} from step(); it must return (obs, reward, "
                "terminated, truncated, info). An env of the old Gym interface needs "
                "gymnasium.make('GymV21Environment-v0', env=…) from shimmy around it"
            )
        problem = _problem_of(result, collate)
        if problem:
            return EnvProtocolError(f"env {env_id} {problem}")
    return EnvProtocolError("the envs returned results from step() that do not fit together")


def _problem_of(result: tuple[Any, ...], collate: Collate) -> str:
    try:
        collate([result[0]])
    except (TypeError, ValueError, KeyError) as error:
        return f"returned an observation outside its observation space from step(): {error}"
    try:
        float(result[1])
    except (TypeError, ValueError):
        return f"returned the reward {_short(result[1])} from step(); it must be a number"
    return ""


def as_frame(frame: Any, render_mode: str | None) -> npt.NDArray[np.uint8]:
    """Check and return what ``env.render()`` gave.

    Raises:
        EnvStateError: if it is no picture, because the env was made with another render mode.
    """
    if not isinstance(frame, np.ndarray) or frame.ndim != 3:
        raise EnvStateError(
            f"render() gave no picture: the env was made with render_mode={render_mode!r}; give "
            'env_kwargs={"render_mode": "rgb_array"}'
        )
    return frame.astype(np.uint8, copy=False)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 120 else f"{text[:117]}…"
