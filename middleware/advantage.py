"""Returns and advantages: from what was collected to what the learner learns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dmiddleware.data import Batch, as_tree, cat, map_nested
from dmiddleware.pipeline import Middleware, OnlineRLContext, Role, middleware
from dmiddleware.policy import CollectMode, LearnMode
from dmiddleware.rl import discounted_return, gae, nstep_return, take_rows
from middleware.support.checks import check_fraction, check_positive

__all__ = ["gae_estimator", "montecarlo_return_estimator", "nstep_reward_enhancer"]

ValueFn = Callable[[Any], torch.Tensor]


def gae_estimator(
    mode: LearnMode | CollectMode, *, discount: float = 0.99, gae_lambda: float = 0.95
) -> Middleware[OnlineRLContext]:
    """Estimate advantages and returns of the collected transitions.

    The values are those of the column ``value``, which the policy gave when it acted. Only where no
    row follows, or the next row belongs to another episode, the policy is asked for the value of
    the true successor, so that a time limit, and the end of the data, still bootstrap.

    Args:
        mode: of a policy with an attribute ``value_fn``: observations ``[N, …]`` to values ``[N]``.
        discount: gamma, in ``[0, 1]``.
        gae_lambda: lambda, in ``[0, 1]``.

    Reads:
        ctx.trajectories: a batch ``[T, …]`` or ``[T, E, …]`` with the columns ``value``,
            ``episode_id`` and those of every transition.

    Writes:
        ctx.train_data: the same rows with the columns ``adv`` and ``ret`` float32.

    Raises:
        ValueError: if ``discount`` or ``gae_lambda`` is outside ``[0, 1]``.
    """
    check_fraction(discount=discount, gae_lambda=gae_lambda)

    @middleware(roles=(Role.LEARNER,), reads=("trajectories",), writes=("train_data",))
    def gae_estimator(ctx: OnlineRLContext) -> None:
        rows = ctx.trajectories
        value = rows["value"]
        cut = _cuts(rows)
        next_value = torch.empty_like(value)
        next_value[:-1] = value[1:]
        value_fn = mode.get_attribute("value_fn")
        successors = map_nested(lambda leaf: leaf[cut], rows["next_obs"])
        next_value[cut] = value_fn(_as_obs(successors)).to(value.dtype)
        adv, ret = gae(
            mode.get_attribute("scale_rewards")(rows),
            value,
            next_value,
            rows["terminated"],
            cut,
            discount=discount,
            gae_lambda=gae_lambda,
        )
        ctx.train_data = _with(rows, adv=adv, ret=ret)

    return gae_estimator


def montecarlo_return_estimator(*, discount: float = 0.99) -> Middleware[OnlineRLContext]:
    """Sum the discounted rewards from each row to the end of its episode.

    Args:
        discount: gamma, in ``[0, 1]``.

    Reads:
        ctx.episodes: whole episodes, a list of batches ``[T_i, …]``.

    Writes:
        ctx.train_data: their rows as one batch ``[T_0 + T_1 + …, …]``, with the column ``ret``
            float32.

    Raises:
        ValueError: if ``discount`` is outside ``[0, 1]``.
    """
    check_fraction(discount=discount)

    @middleware(roles=(Role.LEARNER,), reads=("episodes",), writes=("train_data",))
    def montecarlo_return_estimator(ctx: OnlineRLContext) -> None:
        rows = cat(ctx.episodes)
        ret = discounted_return(rows["reward"], rows["terminated"], rows["done"], discount=discount)
        ctx.train_data = _with(rows, ret=ret)

    return montecarlo_return_estimator


def nstep_reward_enhancer(*, n_step: int, discount: float = 0.99) -> Middleware[OnlineRLContext]:
    """Turn the collected transitions into n-step ones, for a buffer that does not do so itself.

    Rows near the end of an episode, or of what was collected, sum fewer rewards; each row's
    ``discount`` tells how many. (A :class:`~dmiddleware.data.TensorBuffer` with ``n_step`` makes
    them when it samples, from one-step rows, and loses nothing at the end of what was collected.)

    Args:
        n_step: how many rewards to sum.
        discount: gamma, in ``[0, 1]``.

    Reads:
        ctx.trajectories: a batch ``[T, …]`` or ``[T, E, …]``.

    Writes:
        ctx.trajectories: with ``reward`` summed up, ``next_obs`` and ``terminated`` of the last
            step of the sum, and the column ``discount`` float32, what to multiply the bootstrap
            with.

    Raises:
        ValueError: if ``n_step`` is not positive, or ``discount`` outside ``[0, 1]``.
    """
    check_positive(n_step=n_step)
    check_fraction(discount=discount)

    @middleware(roles=(Role.COLLECTOR,), reads=("trajectories",), writes=("trajectories",))
    def nstep_reward_enhancer(ctx: OnlineRLContext) -> None:
        rows = ctx.trajectories
        summed = nstep_return(
            rows["reward"], rows["terminated"], _cuts(rows), n=n_step, discount=discount
        )
        index = summed.bootstrap_row
        next_obs = map_nested(lambda leaf: take_rows(leaf, index), rows["next_obs"])
        ctx.trajectories = _with(
            rows,
            reward=summed.reward,
            next_obs=next_obs,
            terminated=summed.terminated,
            discount=summed.discount,
        )

    return nstep_reward_enhancer


def _cuts(rows: Batch) -> torch.Tensor:
    """Return which rows are not followed by the next step of their episode, ``[T, …]`` bool."""
    cut: torch.Tensor = rows["done"].clone()
    cut[-1] = True
    if "episode_id" in rows:
        # An episode that a failing env cut short has no row that is done.
        cut[:-1] |= rows["episode_id"][1:] != rows["episode_id"][:-1]
    return cut


def _with(rows: Batch, **columns: Any) -> Batch:
    return as_tree({**dict(rows.items()), **columns})


def _as_obs(nested: Any) -> Any:
    return as_tree(nested) if isinstance(nested, dict) else nested
