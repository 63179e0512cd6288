"""Exploration: the probability of a random action while collecting."""

from __future__ import annotations

from collections.abc import Iterable

from dmiddleware.pipeline import ChainView
from dmiddleware.policy import CollectMode, HasModes, as_collect_mode
from dmiddleware.schedule import Schedule
from dmiddleware.settings import takes_options
from middleware.base import BaseMiddleware
from middleware.context import OnlineRLContext
from middleware.roles import Role
from middleware.support.counters import RunCounters
from middleware.support.part_name import PartSettings
from middleware.support.policy_settings import needed, setting_of

__all__ = ["EpsGreedyHandler"]


class EpsGreedyHandler(BaseMiddleware[OnlineRLContext]):
    """Set the probability of a random action, which a schedule lowers during the run.

    The schedule is the policy's ``other.eps``; see :class:`~dmiddleware.rl.Schedule` for its shapes
    and what it may depend on.

    Args:
        policy: a policy with this schedule, or its collect mode; or the schedule itself, or a
            number.

    Reads:
        ctx.env_step: environment steps, summed over all collectors.
        ctx.train_iter: updates of the policy.

    Writes:
        ctx.collect_kwargs: the key ``eps``.

    Raises:
        ConfigError: if the policy has no such schedule, or a value is not a probability.
    """

    roles = (Role.COLLECTOR,)
    reads = ("env_step", "train_iter")
    writes = ("collect_kwargs",)

    @takes_options(PartSettings)
    def __init__(
        self, policy: HasModes | CollectMode | Schedule | float, settings: PartSettings
    ) -> None:
        self.settings = settings
        user = "EpsGreedyHandler"
        if isinstance(policy, Schedule | int | float):
            self._schedule = Schedule.of(policy)
        else:
            mode = as_collect_mode(policy, user=user)
            self._schedule = Schedule.of(needed(setting_of(mode, "eps"), "eps", user=user))
        self._counters = RunCounters({"ε": self._schedule})

    def bind(self, chain: ChainView) -> None:
        """Take the limits of the chain, which a schedule by progress depends on."""
        self._counters.bind(chain)

    def preflight(self, chain: ChainView) -> Iterable[str]:
        """Refuse a schedule by a counter that the chain does not have."""
        return self._counters.preflight(chain)

    def __call__(self, ctx: OnlineRLContext) -> None:
        """Set and log the probability."""
        eps = self._schedule.at(self._counters.of(ctx))
        ctx.collect_kwargs["eps"] = eps
        ctx.log("collect/eps", eps)
