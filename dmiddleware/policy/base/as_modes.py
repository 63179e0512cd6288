"""Turning what a worker is given into a mode: a policy, a mode, or an object with its functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar

import numpy as np
import numpy.typing as npt
from easydict import EasyDict

from dmiddleware.data.batch import Batch, Nested, leaves
from dmiddleware.env import BatchedTimestep
from dmiddleware.errors import ConfigError
from dmiddleware.policy.base.collate import (
    collate_samples,
    is_per_env,
    join_outputs,
    join_transitions,
    row,
    sample_by_trajectory,
    split_inputs,
    to_rows,
)
from dmiddleware.policy.base.command import CommandModePolicy
from dmiddleware.policy.base.modes import CollectMode, CommandMode, EvalMode, HasModes, LearnMode
from dmiddleware.policy.base.policy import Policy
from dmiddleware.schedule import Counters

__all__ = ["as_collect_mode", "as_command_mode", "as_eval_mode", "as_learn_mode"]

M = TypeVar("M")

_NEEDED: Final[Mapping[type, tuple[str, ...]]] = {
    LearnMode: ("forward", "info", "monitor_vars", "get_attribute"),
    CollectMode: ("forward", "process_transition", "get_train_sample", "reset"),
    EvalMode: ("forward", "reset"),
    CommandMode: CommandMode._fields,
}
"""The functions by which a foreign mode is known."""

_CFG: Final = {"traj_len_inf": False, "multi_gpu": False, "seed": None}

_ATTRIBUTES: Final[Mapping[str, Any]] = {
    "act_inputs": (),
    "batch_size": None,
    "batched": False,
    "cfg": EasyDict(_CFG),
    "check_spaces": lambda observation_space, action_space: None,
    "collect_data": True,
    "counters": Counters(),
    "device": "cpu",
    "discount_factor": None,
    "explores": True,
    "initial_state": lambda n: None,
    "is_stochastic": False,
    "learn_columns": (),
    "learn_from": "samples",
    "learns_from_trajectories": False,
    "minibatch_unit": "rows",
    "n_episode": None,
    "n_sample": None,
    "nstep": 1,
    "observe_returns": lambda ret, obs=None: None,
    "on_policy": False,
    "optional_columns": None,
    "scale_rewards": lambda batch: batch["reward"],
    "schedules": {},
}
"""What workers and middleware ask a policy for, where a foreign mode does not have it."""


def as_learn_mode(policy: HasModes | LearnMode, *, user: str) -> LearnMode:
    """Return the learn mode of a policy; a learn mode is returned as it is.

    Another named tuple with the functions of a learn mode is accepted too. Its forward gets a list
    of samples, as in DI-engine, or a batch if its attribute ``learn_from`` is ``"batch"``.

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
    return _as_mode(policy, CollectMode, "collect_mode", user)


def as_eval_mode(policy: HasModes | EvalMode, *, user: str) -> EvalMode:
    """Return the eval mode of a policy; see :func:`as_collect_mode`."""
    return _as_mode(policy, EvalMode, "eval_mode", user)


def as_command_mode(policy: CommandModePolicy | CommandMode | None, *, user: str) -> CommandMode:
    """Return the command mode of a policy; another named tuple with its methods is accepted too.

    Raises:
        ConfigError: if ``policy`` has no command mode.
    """
    return _as_mode(policy, CommandMode, "command_mode", user)


def _as_mode(policy: Any, kind: type[M], name: str, user: str) -> M:
    mode = getattr(policy, name, policy)
    if not isinstance(mode, kind) and not _is_foreign(mode, kind):
        raise ConfigError(
            f"{user} takes a policy or its {name}, got {type(policy).__name__}; "
            f"pass the policy itself, for example {user}(policy, ...)"
        )
    owner = getattr(getattr(mode, "forward", None), "__self__", None)
    functions = _functions_of(mode, kind)
    if isinstance(owner, Policy) and functions.keys() >= _required(kind):
        built = owner.as_mode(kind, functions)
        return mode if isinstance(mode, kind) and mode == built else built
    return mode if isinstance(mode, kind) else _ADOPT[kind](mode)


def _is_foreign(mode: object, kind: type) -> bool:
    """Return whether an object of another class has the functions of a mode."""
    is_ours = isinstance(mode, LearnMode | CollectMode | EvalMode | CommandMode)
    if is_ours or isinstance(mode, type) or hasattr(mode, "learn_mode"):
        return False
    if kind is not LearnMode and _has(mode, _NEEDED[LearnMode]):
        return False  # its forward would learn from what is to be acted on
    return _has(mode, _NEEDED[kind])


def _has(mode: object, functions: tuple[str, ...]) -> bool:
    return all(callable(getattr(mode, function, None)) for function in functions)


def _required(kind: Any) -> set[str]:
    return set(kind._fields) - set(getattr(kind, "_field_defaults", {}))


def _functions_of(mode: object, kind: Any) -> dict[str, Any]:
    """Return the functions of a mode; defaults are left out."""
    given = {field: getattr(mode, field, None) for field in kind._fields}
    unset = (None, *getattr(kind, "_field_defaults", {}).values())
    return {field: function for field, function in given.items() if function not in unset}


def _adopted_learn_mode(mode: Any) -> LearnMode:
    functions = _adopted(mode)

    def forward(data: Batch | list[Any], **kwargs: Any) -> Any:
        if functions["get_attribute"]("learn_from") == "batch":
            return mode.forward(collate_samples(data) if isinstance(data, list) else data, **kwargs)
        return mode.forward(to_rows(data) if isinstance(data, Batch) else data, **kwargs)

    del functions["seed"]
    functions["forward"] = forward
    return LearnMode(info=mode.info, monitor_vars=mode.monitor_vars, **functions)


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
            value = mode.get_attribute(name)
        except (AttributeError, KeyError, NotImplementedError):
            if name not in defaults:
                raise
            value = None
        if name == "cfg":
            return EasyDict({**_CFG, **(value or {})})
        return defaults.get(name) if value is None else value

    defaults = {**_ATTRIBUTES, "state_dict_collect": lambda: _acting_state(mode)}
    return {
        "forward": forward,
        "reset": getattr(mode, "reset", None) or (lambda data_id=None: None),
        "get_attribute": get_attribute,
        "seed": getattr(mode, "seed", lambda seed: None),
        "set_attribute": getattr(mode, "set_attribute", lambda name, value: None),
        "state_dict": getattr(mode, "state_dict", dict),
        "load_state_dict": getattr(mode, "load_state_dict", lambda state: None),
    }


def _acting_state(mode: Any) -> dict[str, Any]:
    """Return the part of a foreign mode's state that acting needs."""
    state: dict[str, Any] = mode.state_dict()
    return {"model": state["model"]} if "model" in state else state


_ADOPT: Final[Mapping[type, Callable[[Any], Any]]] = {
    LearnMode: _adopted_learn_mode,
    CollectMode: _adopted_collect_mode,
    EvalMode: _adopted_eval_mode,
    CommandMode: lambda mode: mode,
}
