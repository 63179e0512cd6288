"""What DI-engine's policies do with the transitions of a trajectory before they are stored."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Mapping
from typing import Any

import torch

from dmiddleware.ding.rl_utils.returns import gae, gae_data
from dmiddleware.ding.utils.collections import list_split, lists_to_dicts

__all__ = [
    "Adder",
    "get_gae",
    "get_gae_with_default_last_value",
    "get_nstep_return_data",
    "get_train_sample",
]


def get_gae(
    data: Any, last_value: torch.Tensor, gamma: float, gae_lambda: float, cuda: bool = False
) -> Any:
    """Give each transition its advantage, ``adv``.

    Args:
        data: transitions of one trajectory, in order, with ``value`` and ``reward``.
        last_value: the value after the last one.
        gamma: the discount.
        gae_lambda: lambda of the paper.
        cuda: not read; advantages are computed where the values are.
    """
    value = torch.stack([row["value"] for row in data])
    next_value = torch.cat([value[1:], last_value.unsqueeze(0)])
    reward = torch.stack([row["reward"] for row in data])
    adv = gae(gae_data(value, next_value, reward, None, None), gamma, gae_lambda)
    for row, advantage in zip(data, adv, strict=True):
        row["adv"] = advantage
    return data


def get_gae_with_default_last_value(
    data: deque[Any], done: bool, gamma: float, gae_lambda: float, cuda: bool = False
) -> Any:
    """Return :func:`get_gae` with the value of the last transition, which is dropped, or with 0.

    The value after an episode that is ``done`` is 0, and no transition is dropped.
    """
    last_value = torch.zeros_like(data[-1]["value"]) if done else data.pop()["value"]
    return get_gae(data, last_value, gamma, gae_lambda, cuda)


def get_nstep_return_data(
    data: Any,
    nstep: int,
    cum_reward: bool = False,
    correct_terminate_gamma: bool = True,
    gamma: float = 0.99,
) -> Any:
    """Give each transition the rewards of ``nstep`` steps, and what comes after them.

    Near the end of the trajectory there are fewer steps; ``reward`` is then filled up with zeros.

    Args:
        data: transitions of one trajectory, in order; changed in place.
        nstep: the number of steps; 1 changes nothing.
        cum_reward: whether ``reward`` becomes the discounted sum, or a row of ``nstep`` rewards.
        correct_terminate_gamma: whether to add ``value_gamma``, the discount of the next value.
        gamma: the discount.
    """
    if nstep == 1:
        return data
    last = data[-1]
    for i, row in enumerate(data):
        rows = [data[j] for j in range(i, min(i + nstep, len(data)))]
        if "next_obs" in row:
            row["next_obs"] = data[i + nstep]["obs"] if i + nstep < len(data) else last["next_obs"]
        row["done"] = rows[-1]["done"]
        rewards = [step["reward"] for step in rows]
        if cum_reward:
            row["reward"] = sum(reward * gamma**k for k, reward in enumerate(rewards))
        else:
            zeros = [torch.zeros_like(rewards[0])] * (nstep - len(rewards))
            row["reward"] = torch.cat([*rewards, *zeros], dim=-1)
        if correct_terminate_gamma:
            row["value_gamma"] = gamma ** len(rewards)
    return data


def get_train_sample(
    data: Any,
    unroll_len: int,
    last_fn_type: str = "last",
    null_transition: Mapping[str, Any] | None = None,
) -> Any:
    """Cut a trajectory into pieces of ``unroll_len``, each a dictionary of lists.

    Args:
        data: transitions of one trajectory, in order.
        unroll_len: the length of a piece; 1 returns the transitions.
        last_fn_type: what becomes of the rest: ``"last"`` puts copies of the steps before it in
            front (of a trajectory that is shorter than one piece, padding behind), ``"drop"`` drops
            it, ``"null_padding"`` pads it behind.
        null_transition: the padding; None: a transition of zeros that is ``done``.

    Raises:
        ValueError: for another ``last_fn_type``.
    """
    if unroll_len == 1:
        return data
    if last_fn_type not in ("last", "drop", "null_padding"):
        raise ValueError(
            f"last_fn_type must be 'last', 'drop' or 'null_padding', got {last_fn_type!r}"
        )
    pieces, rest = list_split(list(data), step=unroll_len)
    if rest is not None and last_fn_type != "drop":
        missing = unroll_len - len(rest)
        if last_fn_type == "last" and pieces:
            pieces.append(copy.deepcopy(pieces[-1][-missing:]) + rest)
        else:
            null = _null(rest[0]) if null_transition is None else null_transition
            pieces.append(rest + [copy.deepcopy(null) for _ in range(missing)])
    return [lists_to_dicts(piece, recursive=True) for piece in pieces]


def _null(row: Mapping[str, Any]) -> dict[str, Any]:
    null = {**copy.deepcopy(dict(row)), "null": True, "done": True}
    if "value_gamma" in null:
        null["value_gamma"] = 0.0
    for key in ("obs", "action", "reward"):
        if isinstance(null.get(key), Mapping):
            null[key] = {name: torch.zeros_like(x) for name, x in null[key].items()}
        elif key in null:
            null[key] = torch.zeros_like(null[key])
    return null


class Adder:
    """These functions as DI-engine's class of them."""

    get_gae = staticmethod(get_gae)
    get_gae_with_default_last_value = staticmethod(get_gae_with_default_last_value)
    get_nstep_return_data = staticmethod(get_nstep_return_data)
    get_train_sample = staticmethod(get_train_sample)
