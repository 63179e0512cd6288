"""n-step returns, for many rows at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from dmiddleware.data.samplers import Ints

__all__ = ["LAST_STEP_COLUMNS", "NStep", "Successor", "n_step_returns"]

LAST_STEP_COLUMNS: Final = ("next_obs", "next_action_mask", "done", "terminated", "truncated")
"""The columns of an n-step transition that are those of its last step."""

Successor: TypeAlias = Callable[[Ints], Ints]
"""Returns the row that follows each row (indices of any shape), -1 where there is none."""


class NStep(NamedTuple):
    """The end of an n-step window for each row.

    Attributes:
        last: index of the last row of the window, int64.
        ret: discounted sum of the window's rewards, of their dtype (float32 if they are integers).
        discount: γ^k, where k is the number of rows in the window, float32.
    """

    last: Ints
    ret: npt.NDArray[Any]
    discount: npt.NDArray[np.float32]


def n_step_returns(
    index: Ints,
    successor: Successor,
    reward_of: Callable[[Ints], npt.NDArray[Any]],
    *,
    n_step: int,
    discount: float,
) -> NStep:
    """Sum rewards over ``n_step`` rows, or fewer where the known part of the episode ends.

    With k rows in the window, ``ret = r_0 + γ r_1 + … + γ^(k-1) r_(k-1)``, and the target is
    ``ret + γ^k V(next_obs of the last row)`` unless that row is terminal.

    :func:`dmiddleware.rl.nstep_return` computes the same for trajectories of tensors, time first.
    There are two, because a buffer's rows are linked, not in order, and only the drawn rows count:
    drawing a batch would take twice as long if it first gathered trajectories for that function.

    Source: Sutton & Barto, "Reinforcement Learning", 2nd edition, equation 7.1.

    Args:
        index: the first rows, int64 of any shape.
        successor: returns the row after each row.
        reward_of: the rewards of rows, ``[*index.shape, …]``.
        n_step: the longest window.
        discount: γ.
    """
    last = index
    reward = reward_of(index)
    ret = reward.astype(np.float64)
    length = np.ones(index.shape, np.int64)
    continues = np.ones(index.shape, np.bool_)
    for distance in range(1, n_step):
        following = successor(last)
        continues &= following >= 0
        if not continues.any():
            break
        last = np.where(continues, following, last)
        length += continues
        counted = continues.reshape(continues.shape + (1,) * (reward.ndim - index.ndim))
        ret += np.where(counted, discount**distance * reward_of(last).astype(np.float64), 0.0)
    dtype = reward.dtype if np.issubdtype(reward.dtype, np.floating) else np.dtype(np.float32)
    return NStep(last, ret.astype(dtype), np.power(discount, length).astype(np.float32))
