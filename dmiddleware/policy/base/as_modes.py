"""Turning what a worker is given into a mode: a policy, a mode, or a named tuple of functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, TypeGuard, TypeVar

import numpy as np
import numpy.typing as npt
from easydict import EasyDict

from dmiddleware.data.batch import Batch, Nested, leaves
from dmiddleware.env import BatchedTimestep
from dmiddleware.errors import ConfigError
from dmiddleware.policy.base.collate import (
    is_per_env,
    join_outputs,
    join_transitions,
    row,
    sample_by_trajectory,
    split_inputs,
)
from dmiddleware.policy.base.command import CommandModePolicy
from dmiddleware.policy.base.modes import CollectMode, CommandMode, EvalMode, HasModes, LearnMode

__all__ = ["as_collect_mode", "as_command_mode", "as_eval_mode", "as_learn_mode"]

M = TypeVar("M")

_COLLECT: Final = ("forward", "process_transition", "get_train_sample", "reset")
_EVAL: Final = ("forward", "reset")
_COMMAND: Final = CommandMode._fields

# What workers ask a policy for, where a foreign mode does not have it.
_ATTRIBUTES: Final[Mapping[str, Any]] = {
    "act_inputs": (),
    "initial_state": lambda n: None,
    "batched": False,
    "on_policy": False,
    "is_stochastic": False,
    "check_spaces": lambda observation_space, action_space: None,
    "collect_data": True,
    "n_sample": None,
    "n_episode": None,
    "cfg": EasyDict(traj_len_inf=False),
}


def as_learn_mode(policy: HasModes | LearnMode, *, user: str) -> LearnMode:
    """Return the learn mode of a policy; a learn mode is returned as it is.

    Args:
        policy: a policy or its learn mode.
        user: the name of the caller, for the error message.

    Raises:
        ConfigError: if ``policy`` is neither.
    """
    return _as_mode(policy, LearnMode, "learn_mode", user)


def as_collect_mode(policy: HasModes | CollectMode, *, user: str) -> CollectMode:
    """Return the collect mode of a policy; see :func:`as_learn_mode`.

    Another named tuple with the functions of a collect mode, written per env, is accepted too.
    """
    if _is_foreign(policy, CollectMode, _COLLECT):
        return _adopted_collect_mode(policy)
    return _as_mode(policy, CollectMode, "collect_mode", user)


def as_eval_mode(policy: HasModes | EvalMode, *, user: str) -> EvalMode:
    """Return the eval mode of a policy; see :func:`as_collect_mode`."""
    if _is_foreign(policy, EvalMode, _EVAL):
        return _adopted_eval_mode(policy)
    return _as_mode(policy, EvalMode, "eval_mode", user)


def as_command_mode(policy: CommandModePolicy | CommandMode | None, *, user: str) -> CommandMode:
    """Return the command mode of a policy; another named tuple with its methods is accepted too.

    Raises:
        ConfigError: if ``policy`` has no command mode.
    """
    if isinstance(policy, tuple) and set(_COMMAND) <= set(getattr(policy, "_fields", ())):
        return policy
    return _as_mode(policy, CommandMode, "command_mode", user)


def _as_mode(policy: object, kind: type[M], name: str, user: str) -> M:
    mode = policy if isinstance(policy, kind) else getattr(policy, name, None)
    if not isinstance(mode, kind):
        raise ConfigError(
            f"{user} takes a policy or its {name}, got {type(policy).__name__}; "
            f"pass the policy itself, for example {user}(policy, ...)"
        )
    return mode


def _is_foreign(mode: object, kind: type[object], needed: tuple[str, ...]) -> TypeGuard[Any]:
    fields = getattr(mode, "_fields", ())
    is_ours = isinstance(mode, kind | LearnMode | CollectMode | EvalMode)
    return isinstance(mode, tuple) and not is_ours and set(needed) <= set(fields)


def _adopted_collect_mode(mode: Any) -> CollectMode:
    def process_transition(obs: Nested, policy_output: Any, timestep: Any) -> Any:
        if isinstance(timestep, BatchedTimestep):
            return join_transitions(mode.process_transition, obs, policy_output, timestep)
        return mode.process_transition(obs, policy_output, timestep)

    def get_train_sample(data: Batch | list[Any]) -> Any:
        if isinstance(data, list):
            return mode.get_train_sample(data)
        return sample_by_trajectory(data, mode.get_train_sample)

    return CollectMode(
        process_transition=process_transition,
        get_train_sample=get_train_sample,
        **_adopted(mode),
    )


def _adopted_eval_mode(mode: Any) -> EvalMode:
    return EvalMode(**_adopted(mode))


def _adopted(mode: Any) -> dict[str, Callable[..., Any]]:
    def forward(data: Any, *, env_id: npt.ArrayLike | None = None, **kwargs: Any) -> Any:
        if isinstance(data, dict) and is_per_env(data):
            return mode.forward(data, **kwargs)
        n_envs = len(next(iter(leaves(data)))[1])
        ids = (np.arange(n_envs) if env_id is None else np.asarray(env_id)).tolist()
        per_env = {one: row(data, index) for index, one in enumerate(ids)}
        return join_outputs(mode.forward(per_env, **split_inputs(kwargs, ids)), ids)

    def get_attribute(name: str) -> Any:
        try:
            return mode.get_attribute(name)
        except (AttributeError, KeyError):
            if name not in _ATTRIBUTES:
                raise
            return _ATTRIBUTES[name]

    return {
        "forward": forward,
        "reset": mode.reset,
        "get_attribute": get_attribute,
        "seed": getattr(mode, "seed", lambda seed: None),
        "set_attribute": getattr(mode, "set_attribute", lambda name, value: None),
        "state_dict": getattr(mode, "state_dict", dict),
        "load_state_dict": getattr(mode, "load_state_dict", lambda state: None),
    }
