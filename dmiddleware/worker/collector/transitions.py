"""Transitions as dictionaries, the form of the classic collectors."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch

from dmiddleware.classic import CollectMode
from dmiddleware.classic.modes import spec_attribute
from dmiddleware.errors import PolicyOutputError
from dmiddleware.tree import Batch, as_tree, index_rows, lead_shape, to_dict

__all__ = [
    "check_fruitful",
    "plain_samples",
    "samples_of",
    "split_rows",
    "to_tensor_transitions",
    "trajectory_length",
]

_MOST_FRUITLESS: Final = 10_000
"""Trajectories in a row that may give no sample."""


def to_tensor_transitions(
    data: Sequence[Mapping[str, Any]], shallow_copy_next_obs: bool = True
) -> list[dict[str, Any]]:
    """Turn consecutive transitions of one env into tensors.

    Args:
        data: transitions, oldest first; values are arrays, tensors, or nested dicts or tuples of
            them. Numbers, truth values and other values stay as they are.
        shallow_copy_next_obs: use the following transition's ``obs`` object as ``next_obs``, which
            saves memory. The last transition, and the last of each episode, keep their own.

    Returns:
        New dictionaries, whose arrays are tensors; those of float64 become float32.
    """
    rows = [
        {
            key: _to_tensor(value)
            for key, value in transition.items()
            if not (key == "next_obs" and shallow_copy_next_obs)
        }
        for transition in data
    ]
    if shallow_copy_next_obs:
        for position, row in enumerate(rows):
            if "next_obs" not in data[position]:
                continue
            is_last = position == len(rows) - 1 or bool(row.get("done", False))
            row["next_obs"] = (
                _to_tensor(data[position]["next_obs"]) if is_last else rows[position + 1]["obs"]
            )
    return rows


def split_rows(batch: Batch) -> list[dict[str, Any]]:
    """Turn a batch ``[N, …]`` into ``N`` dictionaries; tensors share the batch's memory."""
    columns = {str(key): _unbind(batch[key]) for key in batch}
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def trajectory_length(mode: CollectMode, target: int, env_num: int) -> float:
    """Return after how many transitions a trajectory is cut.

    It is the policy's ``unroll_len``, at least an even share of the samples to collect; infinite
    with ``traj_len_inf``.

    Args:
        mode: the policy's collect mode.
        target: number of samples to collect.
        env_num: number of envs.
    """
    cfg = spec_attribute(mode.spec, "cfg")
    if cfg.get("traj_len_inf"):
        return math.inf
    unroll_len = cfg.get("unroll_len") or cfg.get("collect", {}).get("unroll_len") or 1
    return max(unroll_len, math.ceil(target / env_num))


def check_fruitful(n_fruitless: int) -> None:
    """Raise if trajectories keep giving no samples, since collecting would never end.

    Raises:
        PolicyOutputError: after 10,000 of them in a row.
    """
    if n_fruitless >= _MOST_FRUITLESS:
        raise PolicyOutputError(
            f"get_train_sample returned an empty list for {n_fruitless} trajectories in a row, so "
            "collecting would never end; return the samples of a trajectory, for example the "
            "trajectory itself, or check that trajectories are long enough (unroll_len in the "
            "policy's config)"
        )


def plain_samples(samples: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return samples as plain data, for a checkpoint."""
    return [to_dict(sample) for sample in samples]


def samples_of(plain: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the samples that were passed to :func:`plain_samples`."""
    return [
        {k: as_tree(v) if isinstance(v, Mapping) else v for k, v in sample.items()}
        for sample in plain
    ]


def _unbind(column: Any) -> Sequence[Any]:
    if isinstance(column, torch.Tensor):
        return column.unbind(0)
    length = lead_shape(column)[0]
    return [index_rows(column, position) for position in range(length)]


def _to_tensor(value: Any) -> Any:
    if isinstance(value, torch.Tensor | Batch):
        return value
    if isinstance(value, Mapping):
        return {key: _to_tensor(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return tuple(_to_tensor(item) for item in value)
    if isinstance(value, np.ndarray):
        tensor = torch.from_numpy(value)
        return tensor.float() if tensor.dtype == torch.float64 else tensor
    return value
