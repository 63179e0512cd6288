"""What a policy sees when it acts, in addition to observations and env ids.

A policy names what it wants in :attr:`~dmiddleware.policy.Policy.act_inputs`. The component that
steps the envs collects these inputs and passes them to the policy's forward as keyword arguments,
batched as the observations are. They are also columns of what is collected, under the same names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final

import gymnasium as gym
import numpy as np
import torch

from dmiddleware.env.batching import is_finite
from dmiddleware.errors import PolicyError, PolicyOutputError, StructureError
from dmiddleware.model.spaces import action_kind_of, action_parts, action_shape_of
from dmiddleware.policy.action_codec import ActionCodec
from dmiddleware.tree import Batch, Value, as_tree, leaves

__all__ = [
    "ACT_KEYWORDS",
    "STATE",
    "check_act_inputs",
    "check_finite",
    "first_inputs",
    "info_names",
    "previous_action_codec",
    "probe_inputs",
]

STATE: Final = "state"
"""The keyword, the output and the column of the recurrent state."""
_FIXED: Final = ("prev_action", "prev_reward", "is_first", "action_mask")
_INFO: Final = "info."

ACT_KEYWORDS: Final = frozenset({*_FIXED, "info", STATE})
"""The keyword arguments of a forward that have one row per env."""


def check_act_inputs(names: object, *, owner: str) -> None:
    """Reject declared inputs that do not exist.

    Args:
        names: what a class declares as ``act_inputs``.
        owner: the class, for the message.

    Raises:
        PolicyError: naming the first that is wrong, and those that exist.
    """
    allowed = f"{', '.join(_FIXED)} or info.<name>"
    if not isinstance(names, tuple):
        raise PolicyError(
            f"{owner}.act_inputs must be a tuple of {allowed}, got {names!r:.100}; "
            'write act_inputs = ("prev_action",) for example'
        )
    for name in names:
        if name not in _FIXED and not (
            isinstance(name, str) and len(name) > len(_INFO) and name.startswith(_INFO)
        ):
            raise PolicyError(f"{owner}.act_inputs contains {name!r}; it must be one of {allowed}")


def info_names(names: Iterable[str]) -> list[str]:
    """Return the keys of the envs' infos that are among the declared inputs."""
    return [name.removeprefix(_INFO) for name in names if name.startswith(_INFO)]


def previous_action_codec(names: Iterable[str], action_space: gym.Space[Any]) -> ActionCodec | None:
    """Return the codec of the actions of one env; None: the policy does not see previous actions.

    Raises:
        SpaceError: for an unsupported space.
    """
    return ActionCodec.for_space(action_space) if "prev_action" in names else None


def first_inputs(
    names: Iterable[str],
    initial_state: Callable[[int], Any],
    codec: ActionCodec | None,
    n: int,
) -> dict[str, Value]:
    """Return what a policy sees in the first step of an episode: what does not come from the env.

    Args:
        names: the declared inputs.
        initial_state: the policy's method.
        codec: what :func:`previous_action_codec` returns.
        n: number of envs.

    Returns:
        ``prev_action`` ``[n, …]``, see :meth:`ActionCodec.before_first`; ``prev_reward``
        ``[n] float32``, zeros; ``is_first`` ``[n] bool``, true; ``state``, nested tensors
        ``[n, …]``. Only those that are declared, and ``state`` only if the policy is recurrent. The
        caller owns the tensors.

    Raises:
        PolicyOutputError: if the initial state is not made of tensors ``[n, …]``.
    """
    first: dict[str, Value] = {}
    if codec is not None and "prev_action" in names:
        first["prev_action"] = codec.before_first(n)
    if "prev_reward" in names:
        first["prev_reward"] = torch.zeros(n)
    if "is_first" in names:
        first["is_first"] = torch.ones(n, dtype=torch.bool)
    state = initial_state(n)
    if state is not None:
        first[STATE] = _checked_state(state, n)
    return first


def probe_inputs(
    names: Iterable[str],
    initial_state: Callable[[int], Any],
    action_space: gym.Space[Any],
    n: int,
) -> dict[str, Any] | None:
    """Return inputs ``[n, …]`` to try a policy with, as in the first step; None if unknown.

    A mask allows every action. Infos have no space that describes them.
    """
    if info_names(names):
        return None
    inputs = first_inputs(names, initial_state, previous_action_codec(names, action_space), n)
    if "action_mask" in names:
        parts = action_parts(action_kind_of(action_space), action_shape_of(action_space))
        n_logits = sum(part.n_logits for part in parts)
        if n_logits:
            inputs["action_mask"] = torch.ones(n, n_logits, dtype=torch.bool)
    return inputs


def _checked_state(state: Any, n: int) -> Value:
    try:
        value: Value = state if isinstance(state, torch.Tensor) else as_tree({STATE: state})[STATE]
    except Exception as error:
        raise _bad_state(state, n) from error
    parts = list(leaves(value))
    if not parts or any(leaf.dim() == 0 or len(leaf) != n for _, leaf in parts):
        raise _bad_state(state, n)
    return value


def _bad_state(state: object, n: int) -> PolicyOutputError:
    return PolicyOutputError(
        f"the policy's initial_state({n}) returned {state!r:.100}; it must return a tensor, or "
        f"nested dictionaries or tuples of tensors, with {n} rows each, or None if the policy is "
        "not recurrent"
    )


def check_finite(obs: Any, *, user: str) -> None:
    """Reject observations with a value that is NaN or infinite.

    No network can use it: the action would be the first one, or sampling would fail.

    Args:
        obs: observations ``[E, …]``, or a dictionary from env ids to single observations.
        user: the policy's name, for the message.

    Raises:
        StructureError: naming the env (or the row) and the part of a nested observation.
    """
    parts = (("", obs),) if type(obs) is torch.Tensor else _parts(obs)
    for path, leaf in parts:
        if not _is_finite(leaf):
            array = torch.as_tensor(leaf)
            index = (~array.isfinite()).nonzero()[0].tolist()
            raise StructureError(
                f"{user} was given an observation with the value {array[tuple(index)].item()} at "
                f"{path}{index}; no network can act on it. Correct what makes the observations; an "
                "env manager names the env and the step"
            )


def _parts(obs: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(obs, Batch):
        yield from ((f"{path}{name} ", leaf) for name, leaf in leaves(obs))
    elif isinstance(obs, Mapping):
        for key, part in obs.items():
            yield from _parts(part, f"{path}[{key!r}]")
    elif isinstance(obs, tuple):
        for index, part in enumerate(obs):
            yield from _parts(part, f"{path}[{index}]")
    else:
        yield path, obs


def _is_finite(leaf: Any) -> bool:
    if isinstance(leaf, torch.Tensor):
        if not leaf.is_floating_point():
            return True
        if leaf.device.type != "cpu" or leaf.dtype is torch.bfloat16:
            return is_finite(leaf)
        leaf = leaf.detach().numpy()
    if not isinstance(leaf, np.ndarray) or leaf.dtype.kind != "f":
        return True
    return is_finite(leaf)
