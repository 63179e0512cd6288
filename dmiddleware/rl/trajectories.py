"""Turning trajectories, time first, into rows to learn from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dmiddleware.rl.returns import discounted_return, gae, nstep_return, take_rows
from dmiddleware.tree import Batch, Columns, flatten_lead, index_rows, map_leaves, with_columns

__all__ = ["episode_cuts", "with_advantages", "with_nstep_returns", "with_returns_to_go"]


def with_nstep_returns(rows: Batch, *, n: int, discount: float) -> Batch:
    """Return the rows of trajectories as n-step transitions.

    Rows near the end of an episode, or of the data, sum fewer rewards.

    Args:
        rows: ``[T, …]`` or ``[T, E, …]``, with the columns of every transition.
        n: how many rewards to sum.
        discount: gamma, in ``[0, 1]``.

    Returns:
        The same rows: ``reward`` is the n-step sum, ``next_obs``, ``next_action_mask`` (if there is
        one) and ``terminated`` are those of the last step of the sum, and the column ``discount``
        float32 is the factor of the bootstrapped value.

    Raises:
        StructureError: for shapes that differ, and for an empty batch.
        ValueError: if ``n`` is below 1 or ``discount`` outside ``[0, 1]``.
    """
    summed = nstep_return(
        rows["reward"], rows["terminated"], episode_cuts(rows), n=n, discount=discount
    )
    index = summed.bootstrap_row
    successors = {
        name: map_leaves(lambda leaf: take_rows(leaf, index), rows[name])
        for name in ("next_obs", "next_action_mask")
        if name in rows
    }
    return with_columns(
        rows,
        reward=summed.reward,
        **successors,
        terminated=summed.terminated,
        discount=summed.discount,
    )


def with_advantages(
    rows: Batch,
    *,
    reward: torch.Tensor,
    value_fn: Callable[..., torch.Tensor],
    discount: float,
    gae_lambda: float,
    n_ends: int | None = None,
) -> Batch:
    """Return the rows of trajectories with the columns ``adv`` and ``ret`` float32.

    The column ``reward`` of the result has the rewards that they were computed from.

    Where no row of the same episode follows a row, ``value_fn`` computes the value of the true
    successor, so time limits and the end of the data bootstrap too.

    Rewards and values of several agents are ``[T, E, A]``. The value of an agent that the
    ``agent_mask`` of ``next_obs`` leaves out is 0, and its sum ends there.

    Args:
        rows: ``[T, …]`` or ``[T, E, …]``, with the column ``value`` and those of every transition.
        reward: the rewards, ``[T, …]`` float32, perhaps scaled.
        value_fn: observations ``[N, …]`` to values ``[N]``, or ``[N, A]``. If the rows have the
            ``state`` of a recurrent policy, it also takes ``rows``, the rows ``[N, …]`` before the
            observations.
        discount: gamma, in ``[0, 1]``.
        gae_lambda: lambda, in ``[0, 1]``.
        n_ends: how many rows before the last ones of their lanes are not followed by the next step
            of their episode, where it is known: then nothing waits for a device to count them. With
            another number than this, all advantages are NaN.

    Raises:
        StructureError: for shapes that differ, and for an empty batch.
        ValueError: if ``discount`` or ``gae_lambda`` is outside ``[0, 1]``.
    """
    value, cut = rows["value"], episode_cuts(rows)
    next_value = torch.empty_like(value)
    next_value[:-1] = value[1:]
    if n_ends is None:
        at, is_right = cut, None
        flat, bootstrapped = rows, next_value
    else:
        at, is_right = _true_rows(cut, n_ends + cut[0].numel())
        flat, bootstrapped = (
            flatten_lead(rows, cut.dim()),
            next_value.view(-1, *value.shape[cut.dim() :]),
        )
    successors = index_rows(flat["next_obs"], at)
    before = {"rows": index_rows(flat, at)} if "state" in rows else {}
    bootstrapped[at] = value_fn(successors, **before).to(value.dtype)
    terminated = rows["terminated"]
    if value.dim() > cut.dim():
        next_obs: Any = rows["next_obs"]
        gone = next_obs["agent_mask"] == 0
        terminated, cut = terminated.unsqueeze(-1) | gone, cut.unsqueeze(-1) | gone
    adv, ret = gae(
        reward,
        value,
        next_value,
        terminated,
        cut,
        discount=discount,
        gae_lambda=gae_lambda,
    )
    if is_right is not None:
        adv = adv.masked_fill(~is_right, torch.nan)
    return with_columns(rows, reward=reward, adv=adv, ret=ret)


def _true_rows(flags: torch.Tensor, n: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return where ``n`` flags are true, and whether this many are, without waiting for a device.

    Returns:
        ``[n] int64``, in the order of the flattened flags, and a bool scalar.
    """
    flat = flags.flatten()
    place = flat.cumsum(0) - 1
    rows = torch.arange(len(flat), device=flat.device)
    slots = torch.zeros_like(rows[:1]).expand(n + 1).clone()
    # All rows that are not wanted go to the last slot.
    slots.scatter_(0, place.clamp_(max=n).masked_fill(~flat, n), rows)
    return slots[:n], flat.sum() == n


def with_returns_to_go(rows: Batch) -> Batch:
    """Return the rows of whole episodes with the columns that a decision transformer needs.

    Args:
        rows: ``[T, …]`` or ``[T, E, …]``, with the columns of every transition. An episode begins
            and ends where the data of its lane does.

    Returns:
        The same rows, with ``return_to_go`` float32, the sum of the rewards from the row to the end
        of its episode, and ``timestep`` int64, the row's place in its episode, from 0.

    Raises:
        StructureError: for shapes that differ, and for an empty batch.
    """
    cut = episode_cuts(rows)
    reward = rows["reward"].double()  # sums of long episodes lose digits in float32
    ret = discounted_return(reward, rows["terminated"], cut, discount=1.0)
    place = (
        torch.arange(len(cut), device=cut.device).view(-1, *(1,) * (cut.dim() - 1)).expand_as(cut)
    )
    starts = torch.ones_like(cut)
    starts[1:] = cut[:-1]
    first = place.masked_fill(~starts, 0).cummax(0).values
    return with_columns(rows, return_to_go=ret.float(), timestep=place - first)


def episode_cuts(rows: Columns) -> torch.Tensor:
    """Return which rows are not followed by the next step of their episode.

    Args:
        rows: ``[T, …]`` with the column ``done``, and ``episode_id`` if there is one.

    Returns:
        ``[T, …]`` bool.
    """
    cut: torch.Tensor = rows["done"].clone()
    cut[-1] = True
    if "episode_id" in rows:
        # An episode that a failing env cut short has no row with done.
        cut[:-1] |= rows["episode_id"][1:] != rows["episode_id"][:-1]
    return cut
