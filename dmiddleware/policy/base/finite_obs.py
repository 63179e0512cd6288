"""A check that a policy acts on finite observations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from dmiddleware.data.batch import Batch, leaves
from dmiddleware.env.usable_values import is_finite
from dmiddleware.errors import StructureError

__all__ = ["check_finite"]


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
