"""Returns and advantages of collected data."""

from __future__ import annotations

import torch

from dmiddleware.errors import ConfigError
from dmiddleware.policy import AnyMode, PolicySpec, spec_of
from dmiddleware.policy.agents import agents_that_take_part
from dmiddleware.rl import (
    discounted_return,
    explained_variance,
    with_advantages,
    with_nstep_returns,
)
from dmiddleware.settings import takes_options
from dmiddleware.tree import Batch, Value, as_tree, cat, index_rows, with_columns
from middleware.base import BaseMiddleware
from middleware.context import OnlineRLContext
from middleware.roles import Role
from middleware.support.part_name import PartSettings
from middleware.support.policy_settings import needed
from middleware.support.rows import rows_of

__all__ = [
    "AdvantageEstimator",
    "GAEEstimator",
    "MonteCarloReturnEstimator",
    "NStepRewardEnhancer",
]

_VALUES_AT_ONCE = 1024


class AdvantageEstimator:
    """Estimates advantages with a policy's discount, λ, reward scale and value function.

    Args:
        policy: a policy or one of its modes.
        user: the name of the middleware, for messages.

    Raises:
        ConfigError: if the policy has no discount or λ.
    """

    def __init__(self, policy: AnyMode, *, user: str) -> None:
        self._spec = spec = spec_of(policy, user=user)
        self._discount = needed(spec.discount, "discount", user=user)
        self._gae_lambda = needed(spec.gae_lambda, "gae_lambda", user=user)
        value_fn = spec.value_fn
        if value_fn is None:
            raise ConfigError(
                f"{user} needs values of observations, but the policy has no value_fn; use an "
                "actor-critic such as PPOPolicy"
            )
        self._value_fn = value_fn

    def __call__(self, rows: Batch, *, n_ends: int | None = None) -> Batch:
        """Return collected rows with ``adv`` and ``ret``; updates the policy's statistics.

        Args:
            rows: ``[T, …]`` or ``[T, E, …]``.
            n_ends: see :func:`~dmiddleware.rl.with_advantages`.
        """
        estimated = self._estimate(rows, self._spec.scale_rewards(rows), n_ends=n_ends)
        self._spec.observe_returns(estimated["ret"], estimated.get("obs"))
        return estimated

    def again(self, rows: Batch, obs: Value) -> Batch:
        """Estimate once more, with the value function as it is now.

        Args:
            rows: what was estimated before, ``[T, …]`` or ``[T, E, …]``.
            obs: its observations ``[N, …]`` on any device.

        Returns:
            The columns ``value``, ``adv`` and ``ret`` in the shape of ``rows``.
        """
        value_fn, n_rows = self._value_fn, rows["done"].numel()
        parts = (slice(at, at + _VALUES_AT_ONCE) for at in range(0, n_rows, _VALUES_AT_ONCE))
        values = [value_fn(index_rows(obs, part)) for part in parts]
        value = torch.cat(values).reshape(rows["value"].shape)
        estimated = self._estimate(with_columns(rows, value=value), rows["reward"])
        return as_tree({name: estimated[name] for name in ("value", "adv", "ret")})

    def _estimate(self, rows: Batch, reward: torch.Tensor, *, n_ends: int | None = None) -> Batch:
        return with_advantages(
            rows,
            reward=reward,
            value_fn=self._value_fn,
            discount=self._discount,
            gae_lambda=self._gae_lambda,
            n_ends=n_ends,
        )


class GAEEstimator(BaseMiddleware[OnlineRLContext]):
    """Estimate advantages and returns of the collected transitions.

    The discount and λ are the policy's. The values are those of the column ``value``, which the
    policy returned when it acted. Where no row of the same episode follows a row, the policy
    computes the value of the true successor, so time limits and the end of the data bootstrap too.

    Args:
        policy: a policy (or one of its modes) with ``discount``, ``gae_lambda`` and an
            attribute ``value_fn``: observations ``[N, …]`` to values ``[N]``. That of a recurrent
            policy also takes ``rows``, the rows before the observations.

    Reads:
        ctx.trajectories: a batch ``[T, …]`` or ``[T, E, …]`` with the columns ``value``,
            ``episode_id`` and those of every transition; None if an exchange pauses collecting to
            keep its pace. For rows on a device, ``ctx.trajectory_end_idx``, if it is set, tells
            how many episodes end without waiting for the device.

    Writes:
        ctx.train_data: the same rows with the columns ``adv`` and ``ret`` float32; ``reward`` has
            the rewards that they were computed from, as the policy scales them.

    How well the values predict the returns is logged as ``learn/explained_variance``.

    Raises:
        ConfigError: if ``policy`` is not a policy, or has no discount or λ.
    """

    roles = (Role.LEARNER,)
    reads = ("trajectories",)
    writes = ("train_data",)

    @takes_options(PartSettings)
    def __init__(self, policy: AnyMode, settings: PartSettings) -> None:
        self.settings = settings
        user = "GAEEstimator"
        self._estimate = AdvantageEstimator(policy, user=user)

    def __call__(self, ctx: OnlineRLContext) -> None:
        """Estimate."""
        if ctx.trajectories is None:
            return
        rows, n_ends = rows_of(ctx.trajectories), None
        if not rows["done"].is_cpu and ctx.trajectory_end_idx is not None:
            # The last rows of the lanes end in any case.
            n_before_last = rows["done"].numel() - rows["done"][0].numel()
            n_ends = int((ctx.trajectory_end_idx < n_before_last).sum())
        ctx.train_data = rows = self._estimate(rows, n_ends=n_ends)
        explained = explained_variance(
            rows["value"], rows["ret"], mask=agents_that_take_part(rows.get("obs"))
        )
        if not (explained.is_cpu and explained.isnan()):
            ctx.log("learn/explained_variance", explained)


def _single_agent_spec(policy: AnyMode, *, user: str) -> PolicySpec:
    """Return what others read of a policy.

    Raises:
        ConfigError: if it acts for several agents.
    """
    spec = spec_of(policy, user=user)
    if getattr(spec.kind, "several_agents", False):
        raise ConfigError(
            f"{user} sums the rewards of a single agent, but {spec.kind.__name__} acts for "
            "several; use GAEEstimator, or a TensorBuffer with n_step"
        )
    return spec


class MonteCarloReturnEstimator(BaseMiddleware[OnlineRLContext]):
    """Sum the discounted rewards from each row to the end of its episode.

    Args:
        policy: a policy (or one of its modes) with ``discount``.

    Reads:
        ctx.episodes: whole episodes, a list of batches ``[T_i, …]``.

    Writes:
        ctx.train_data: their rows as one batch ``[T_0 + T_1 + …, …]``, with the column ``ret``
            float32.

    Raises:
        ConfigError: if ``policy`` is not a policy, has no discount, or acts for several agents.
    """

    roles = (Role.LEARNER,)
    reads = ("episodes",)
    writes = ("train_data",)

    @takes_options(PartSettings)
    def __init__(self, policy: AnyMode, settings: PartSettings) -> None:
        self.settings = settings
        user = "MonteCarloReturnEstimator"
        spec = _single_agent_spec(policy, user=user)
        self._discount = needed(spec.discount, "discount", user=user)

    def __call__(self, ctx: OnlineRLContext) -> None:
        """Sum."""
        rows = cat([rows_of(episode, name="ctx.episodes") for episode in ctx.episodes or ()])
        ret = discounted_return(
            rows["reward"], rows["terminated"], rows["done"], discount=self._discount
        )
        ctx.train_data = with_columns(rows, ret=ret)


class NStepRewardEnhancer(BaseMiddleware[OnlineRLContext]):
    """Turn the collected transitions into n-step ones, for a buffer that cannot do so itself.

    The length n and the discount are the policy's. Rows near the end of an episode, or of the
    batch, sum fewer rewards; the column ``discount`` accounts for that. (A
    :class:`~dmiddleware.data.TensorBuffer` with ``n_step`` computes n-step returns when it samples,
    and loses nothing at the end of a batch.)

    Args:
        policy: a policy (or one of its modes) with ``n_step`` and ``discount``.

    Reads:
        ctx.trajectories: a batch ``[T, …]`` or ``[T, E, …]``.

    Writes:
        ctx.trajectories: ``reward`` is the n-step sum, ``next_obs`` and ``terminated`` are those of
            the last step of the sum, and the column ``discount`` float32 is the factor of the
            bootstrapped value.

    Raises:
        ConfigError: if ``policy`` is not a policy, has no discount, or acts for several agents.
    """

    roles = (Role.COLLECTOR,)
    reads = ("trajectories",)
    writes = ("trajectories",)
    computes_n_step = True

    @takes_options(PartSettings)
    def __init__(self, policy: AnyMode, settings: PartSettings) -> None:
        self.settings = settings
        user = "NStepRewardEnhancer"
        spec = _single_agent_spec(policy, user=user)
        self._discount = needed(spec.discount, "discount", user=user)
        self._n_step = spec.n_step

    def __call__(self, ctx: OnlineRLContext) -> None:
        """Sum."""
        rows = rows_of(ctx.trajectories)
        ctx.trajectories = with_nstep_returns(rows, n=self._n_step, discount=self._discount)
