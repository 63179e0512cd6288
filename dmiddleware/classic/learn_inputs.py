"""The batch from which the hooks of DI-engine's policies learn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch

from dmiddleware.classic.collate import collate_samples
from dmiddleware.errors import ConfigError
from dmiddleware.tree import Batch, to_dict

__all__ = ["default_preprocess_learn"]

_NUMBERS: Final = ("reward", "done", "value", "adv", "weight", "IS", "priority_IS", "value_gamma")
"""Columns with one number per row, which may come as ``[B, 1]``."""


def default_preprocess_learn(
    data: Sequence[Mapping[str, Any]] | Batch,
    use_priority_IS_weight: bool = False,  # noqa: N803 (DI-engine's name)
    use_priority: bool = False,
    use_nstep: bool = False,
    ignore_done: bool = False,
) -> dict[str, Any]:
    """Stack samples for a ``_forward_learn``, as DI-engine's policies do it first.

    Args:
        data: samples with ``action``, ``reward`` and ``done``; or a batch ``[B, …]`` of them.
        use_priority_IS_weight: whether ``weight`` is the importance weight ``priority_IS`` or
            ``IS``.
        use_priority: whether samples have priorities, without which there are no such weights.
        use_nstep: whether ``reward`` becomes ``[n, B]``, or ``[n, B, A]`` of several agents.
        ignore_done: whether ``done`` is 0 everywhere.

    Returns:
        The columns by name, ``[B, …]``; ``done`` is float32, and ``weight`` may be None.

    Raises:
        ConfigError: for importance weights without priorities, or samples without them.
    """
    columns: dict[str, Any] = to_dict(data if isinstance(data, Batch) else collate_samples(data))
    action = columns["action"]
    is_discrete = isinstance(action, torch.Tensor) and not action.is_floating_point()
    for name in (*_NUMBERS, *(("action",) if is_discrete else ())):
        column = columns.get(name)
        if isinstance(column, torch.Tensor) and column.dim() == 2 and column.shape[1] == 1:
            columns[name] = column.squeeze(1)
    done = columns["done"].float()
    columns["done"] = torch.zeros_like(done) if ignore_done else done
    columns["weight"] = columns.get("weight")
    if use_priority_IS_weight:
        weight = columns.get("priority_IS", columns.get("IS"))
        if not use_priority or weight is None:
            raise ConfigError(
                "use_priority_IS_weight needs use_priority, and samples with the importance weight "
                "IS or priority_IS"
            )
        columns["weight"] = weight
    if use_nstep:
        reward = columns["reward"]
        reward = reward.unsqueeze(1) if reward.dim() == 1 else reward
        columns["reward"] = reward.movedim(-1, 0).contiguous()
    return columns
