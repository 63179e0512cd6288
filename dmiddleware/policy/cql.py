"""Conservative Q-learning."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch

from dmiddleware.policy.component import Component, adam
from dmiddleware.policy.obs_norm import DatasetNormSettings
from dmiddleware.policy.policy_registry import POLICY_REGISTRY
from dmiddleware.policy.sac import SACPolicy, SACSettings
from dmiddleware.policy.temperature import Temperature
from dmiddleware.schedule import LearningRate
from dmiddleware.settings import Count, Number, Positive
from dmiddleware.tree import Columns, Value, map_leaves

__all__ = ["CQLPolicy", "CQLSettings"]


class CQLSettings(DatasetNormSettings, SACSettings):
    """The settings of CQL."""

    obs_norm = False
    learning_rate_policy: LearningRate = 1e-4
    cql_alpha: Positive = 5.0
    """The α of the paper: weight of the penalty, or the first one."""
    lagrange_gap: Number | None = None
    """The τ of the paper: the gap that the tuned weight aims at; None: a fixed weight."""
    learning_rate_lagrange: LearningRate = 3e-4
    """Adam's learning rate for the tuned weight."""
    n_actions: Count = 10
    """Actions of each of the three kinds from which the integral is estimated."""


@POLICY_REGISTRY.register("cql")
class CQLPolicy(SACPolicy):
    """CQL (Kumar et al., "Conservative Q-Learning for Offline Reinforcement Learning", 2020).

    :class:`SACPolicy` whose critics also learn low values for all actions, and high values for
    those in the data (CQL(H), equation 4), so values of unknown actions are not overestimated. The
    integral over all actions is estimated from random actions and actions of the policy, each
    weighted by its density (appendix F). The weight of this penalty is fixed, or tuned so that
    values of all actions exceed the values of the data by ``lagrange_gap`` on average (appendix F).

    Learns from the columns of :class:`SACPolicy`, and needs no environment. With ``obs_norm``, call
    :meth:`observe` with the observations of the data set before learning. As in the authors' own
    code, targets do not contain the entropy, unlike SAC's, and a third of the actions are the
    policy's for ``next_obs``. Differences from that code: the actor does not start with behavior
    cloning; the estimate of the integral is a mean over the ``3 * n_actions`` actions, as in
    appendix F, where that code has their sum; the squared error is halved, as in equation 4, where
    that code has all of it; and networks have two hidden layers of 256 units, where that code has
    three. With that code's ``min_q_weight`` w and threshold τ, the same loss has here

    - ``cql_alpha = w / 2``: the default of 5 is its w = 10;
    - ``lagrange_gap = τ / w - log(3 * n_actions)``, because that code compares τ with w times the
      sum's gap: its AntMaze settings, w = 5, τ = 5 and 10 actions, are 1 - 3.40 = -2.40 here; w = 1
      and τ = 5 are 1.60.
    """

    cfg: CQLSettings
    penalty_weight: Component[Temperature]
    reports: ClassVar[tuple[str, ...]] = (*SACPolicy.reports, "cql_gap", "cql_alpha")

    def make_components(self) -> dict[str, Component[Any]]:
        """Return the networks, and how each is trained."""
        cfg = self.cfg
        tuned = adam(cfg.learning_rate_lagrange)
        weight = Component(Temperature(cfg.cql_alpha), None if cfg.lagrange_gap is None else tuned)
        return {**super().make_components(), "penalty_weight": weight}

    def draw(self, batch: Columns) -> dict[str, torch.Tensor]:
        """Return the random numbers of an update."""
        drawn = super().draw(batch)
        shape = (self.cfg.n_actions, *drawn["noise"].shape)
        generator = self.learn_generator
        uniform = (
            torch.rand(shape, generator=generator, device=self.draw_device).mul_(2.0).sub_(1.0)
        )
        normal = torch.randn(2, *shape, generator=generator, device=self.draw_device)
        return {
            **drawn,
            "random_action": uniform.to(self.device),
            "policy_noise": normal.to(self.device),
        }

    def critic_loss_of(  # type: ignore[override]  # takes what draw returns in addition
        self,
        batch: Columns,
        next_action: torch.Tensor,
        *,
        bonus: torch.Tensor,
        random_action: torch.Tensor,
        policy_noise: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        """Return the loss of the critics."""
        loss, td_error, logged = super().critic_loss_of(
            batch, next_action, bonus=torch.zeros_like(bonus)
        )
        gap = self._conservative_gap(batch, random_action, policy_noise)
        log_alpha, aim = self.penalty_weight.module.log_alpha, self.cfg.lagrange_gap
        excess = gap if aim is None else gap - aim
        if aim is not None:
            self.penalty_weight.step(-(log_alpha.exp() * excess.detach().mean()))
        alpha = log_alpha.detach().exp()
        logged |= {"cql_gap": gap.mean(), "cql_alpha": alpha}
        return loss + alpha * excess.sum(), td_error, logged

    def _conservative_gap(
        self, batch: Columns, random_action: torch.Tensor, policy_noise: torch.Tensor
    ) -> torch.Tensor:
        """Return, for each critic, how far values of all actions exceed the values of the data.

        That is the mean of ``log ∫ exp Q(s, a) da - Q(s, a_data)`` over the batch, ``[n_critics]``.

        Args:
            batch: the columns.
            random_action: ``[N, B, A]`` uniform in ``(-1, 1)``.
            policy_noise: ``[2, N, B, A]`` standard normal, for actions at ``obs`` and ``next_obs``.
        """
        critic, obs = self.critic.module, batch["obs"]
        with torch.no_grad():
            drawn, log_prob = self.draw_action(obs, policy_noise[0])
            next_drawn, next_log_prob = self.draw_action(batch["next_obs"], policy_noise[1])
        uniform = torch.full_like(log_prob, -math.log(2.0) * drawn.shape[-1])
        action = torch.cat([random_action, drawn, next_drawn])
        log_density = torch.cat([uniform, log_prob, next_log_prob])
        n = len(action)
        q = self.critics(critic, repeated_rows(obs, n), action.flatten(0, 1))
        by_action: torch.Tensor = q.unflatten(1, (n, -1))  # type: ignore[no-untyped-call]
        integral = (by_action - log_density).logsumexp(1) - math.log(n)
        gap = integral - self.critics(critic, obs, self.codec.to_raw(batch["action"]))
        return gap.mean(-1)


def repeated_rows(obs: Value, n: int) -> Value:
    """Return observations ``[n * B, …]``: rows ``[B, …]``, ``n`` times."""
    repeated: Value = map_leaves(lambda leaf: leaf.expand(n, *leaf.shape).flatten(0, 1), obs)
    return repeated
