"""Distributional deterministic policy gradients."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import nn

from dmiddleware.errors import PolicyOutputError
from dmiddleware.policy.ddpg import DDPGPolicy, DDPGSettings
from dmiddleware.policy.modes import PolicySpec
from dmiddleware.policy.network_outputs import with_rows
from dmiddleware.policy.policy_registry import POLICY_REGISTRY
from dmiddleware.policy.return_support import ReturnSupport
from dmiddleware.policy.update import CHECK_EVERY
from dmiddleware.rl import categorical_target, clipped_share, weighted_mean
from dmiddleware.schedule import LearningRate
from dmiddleware.tree import Batch, Columns, Value

__all__ = ["D4PGPolicy", "D4PGSettings"]


class D4PGSettings(DDPGSettings):
    """The settings of D4PG."""

    n_step = 5
    learning_rate_critic: LearningRate = 1e-4
    learning_rate_actor: LearningRate = 1e-4
    noise_sigma = 0.3


@POLICY_REGISTRY.register("d4pg")
class D4PGPolicy(DDPGPolicy):
    """D4PG (Barth-Maron et al., "Distributional Policy Gradients", ICLR 2018).

    :class:`DDPGPolicy` with what the paper adds (algorithm 1):

    - the critic gives an action a distribution over the returns ``v_min`` to ``v_max``
      (:class:`~dmiddleware.model.CategoricalActorQ`), and learns the projected distribution of the
      target by the cross-entropy, as :class:`C51Policy`; the actor follows its mean (equation 4);
    - the target is a 5-step return (``n_step``), which the buffer computes;
    - with ``priority``, replay is prioritized, by the Kullback-Leibler divergence from the target;
    - several collectors, as ``ditask`` starts them.

    ``v_min`` and ``v_max`` depend on the env; see :class:`C51Policy` for what is checked and
    logged. Learning rates, n and the noise are those of the paper. Differences from it: target
    networks follow in small steps, as in DDPG, where the paper copies the weights from time to
    time; and the priority, for which the paper leaves open how distributions are compared.
    """

    cfg: D4PGSettings
    reports: ClassVar[tuple[str, ...]] = (
        "total_loss",
        "critic_loss",
        "actor_loss",
        "q_value",
        "target_q_value",
        "clipped_share",
        "cur_lr",
    )
    model_type: ClassVar[str] = "categorical_actor_q"
    model_defaults: ClassVar[Mapping[str, Any]] = {}

    @property
    def support(self) -> torch.Tensor:
        """The returns ``[n_atoms]`` that the critic's atoms stand for."""
        support = getattr(self.model, "support", None)
        if not isinstance(support, torch.Tensor) or support.dim() != 1:
            raise PolicyOutputError(
                f"{type(self).__name__} needs a model with a buffer support [n_atoms], the returns "
                "that its critic's atoms stand for; derive it from CategoricalActorQ"
            )
        return support

    def critic_loss_of(
        self, batch: Columns, next_action: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        """Return the critic's loss; see :meth:`DDPGPolicy.critic_loss_of`."""
        reward, terminated = batch["reward"], batch["terminated"]
        discount, support = batch.get("discount", self.cfg.discount), self.support
        with torch.no_grad():
            next_probs = self._log_probs(self.critic.target, batch["next_obs"], next_action).exp()
            next_prob = self._of_smallest_mean(next_probs)
        moved: dict[str, Any] = {"discount": discount, "support": support}
        target = categorical_target(next_prob, reward, terminated, **moved)
        action = self.codec.to_raw(batch["action"])
        log_probs = self._log_probs(self.critic.module, batch["obs"], action)
        losses = -(target * log_probs).sum(-1)
        # What remains of the cross-entropy without the target's entropy, which nothing can change.
        divergence = losses.detach().mean(0) + torch.xlogy(target, target).sum(-1)
        logged = {
            "q_value": (log_probs.exp() * support).sum(-1).mean(),
            "target_q_value": (target * support).sum(-1).mean(),
            "clipped_share": clipped_share(next_prob, reward, terminated, **moved),
        }
        loss = weighted_mean(losses.sum(0), batch.get("weight"))
        return loss, divergence.clamp_min(0.0), logged

    def value_of(self, obs: Value, action: torch.Tensor) -> torch.Tensor:
        """Return ``[B]``, the smallest of the expected returns of raw actions ``[B, A]``."""
        log_probs = self._log_probs(self.critic.module, obs, action)
        return (log_probs.exp() * self.support).sum(-1).amin(0)

    def _of_smallest_mean(self, probs: torch.Tensor) -> torch.Tensor:
        """Return ``[B, n_atoms]``: in each row, the distribution of one of ``[C, B, n_atoms]``."""
        if len(probs) == 1:
            return probs[0]
        chosen = (probs * self.support).sum(-1).argmin(0)
        return probs.gather(0, chosen.view(1, -1, 1).expand_as(probs[:1]))[0]

    def _log_probs(self, critic: nn.Module, obs: Value, action: torch.Tensor) -> torch.Tensor:
        """Return ``[n_critics, B, n_atoms]``, the log-probabilities of the returns."""
        shape = ("n_critics", len(action), len(self.support))
        return with_rows(critic(obs, action), shape, what="of the critic").log_softmax(-1)

    def learn(self, batch: Batch, **kwargs: Any) -> Mapping[str, Any] | list[Mapping[str, Any]]:
        """Make one update; see :meth:`Policy.learn`."""
        output = super().learn(batch, **kwargs)
        assert isinstance(output, Mapping)  # of one update
        # A GPU is waited for as rarely as for the check of skipped steps.
        if not self.on_gpu or self.train_iter % CHECK_EVERY == 0:
            self._returns.warn_of_clipping(output["clipped_share"])
        return output

    @cached_property
    def _returns(self) -> ReturnSupport:
        options = None if self._has_own_model or "type" in self.cfg.model else self.cfg.model
        return ReturnSupport(
            self.support, options, discount=self.cfg.discount, owner=type(self).__name__
        )

    @cached_property
    def spec(self) -> PolicySpec:
        """What others read of the policy."""
        return replace(super().spec, check_returns=self._returns.check)
