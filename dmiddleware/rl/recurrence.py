"""The backward linear recurrence behind every return and advantage."""

from __future__ import annotations

import torch

from dmiddleware.errors import StructureError

__all__ = ["discounted_scan"]

# Above this many values per time step, one pass per step is bound by memory, not by call overhead,
# and beats the doubling scan, which touches everything log2(T) times (measured on one CPU core).
_WIDE_ROW = 256


@torch.no_grad()
def discounted_scan(value: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """Solve ``y[t] = value[t] + factor[t] * y[t + 1]`` backwards in time, with ``y[T] = 0``.

    Narrow rows are solved by recursive doubling in ``log2(T)`` steps over the whole tensor (Hillis
    and Steele, "Data Parallel Algorithms", 1986), wide rows on a CPU by one pass per time step.

    Args:
        value: ``[T, …]`` floating point.
        factor: ``[T, …]`` like ``value``; its last row is not used.

    Returns:
        ``y``, a new tensor like ``value``, without gradient.
    """
    if value[:1].numel() > _WIDE_ROW and value.device.type == "cpu":
        return _scan_by_rows(value, factor)
    return _scan_by_doubling(value, factor)


def check_time_first(reward: torch.Tensor, **columns: torch.Tensor | None) -> None:
    """Reject columns that are not all ``[T, …]`` of one shape with ``T >= 1``.

    Raises:
        StructureError: naming the column, its shape, and the shape of the reward.
    """
    if reward.dim() < 1 or reward.shape[0] == 0:
        raise StructureError(
            f"reward must be [T, …] with at least one time step, got shape {tuple(reward.shape)}; "
            "collect before computing returns"
        )
    for name, column in columns.items():
        if column is None:
            continue
        if column.shape != reward.shape:
            raise StructureError(
                f"{name} has shape {tuple(column.shape)} and reward {tuple(reward.shape)}; both "
                "must be [T, …] alike, so squeeze or flatten one of them"
            )
        if name in ("terminated", "done") and column.dtype != torch.bool:
            raise StructureError(
                f"{name} must be of dtype bool, got {column.dtype}; convert it with .bool()"
            )


def check_fraction(**named: float) -> None:
    """Reject numbers outside ``[0, 1]``.

    Raises:
        ValueError: naming the number and its value.
    """
    for name, number in named.items():
        if not 0.0 <= number <= 1.0:
            raise ValueError(f"{name} must be in [0, 1], got {number}")


def _scan_by_doubling(value: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    n_steps = value.shape[0]
    solved = value.clone()
    # After each round, solved[t] covers the steps t … t + reach - 1, and reaching[t] is the factor
    # that carries what lies beyond them.
    reaching = factor[: n_steps - 1]
    reach = 1
    while reach < n_steps:
        solved[:-reach].add_(reaching * solved[reach:])
        n_left = max(n_steps - 2 * reach, 0)
        reaching = reaching[:n_left] * reaching[reach : reach + n_left]
        reach *= 2
    return solved


def _scan_by_rows(value: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    solved = value.clone()
    rows = solved.unbind(0)
    factors = factor.unbind(0)
    for step in range(len(rows) - 2, -1, -1):
        rows[step].addcmul_(factors[step], rows[step + 1])
    return solved
