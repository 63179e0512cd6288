"""Soft actor-critic for discrete actions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import nn

from dmiddleware.policy.action_codec import mask_of
from dmiddleware.policy.component import Component, TargetRule, adam
from dmiddleware.policy.network_outputs import with_rows
from dmiddleware.policy.obs_groups import ObsGroupSettings
from dmiddleware.policy.policy_registry import POLICY_REGISTRY
from dmiddleware.policy.td import TDPolicy, TDSettings
from dmiddleware.policy.temperature import Temperature
from dmiddleware.rl import Categorical, ensemble_td_loss
from dmiddleware.schedule import LearningRate
from dmiddleware.settings import Fraction, Positive
from dmiddleware.tree import Columns, Value

__all__ = ["DiscreteSACPolicy", "DiscreteSACSettings"]


class DiscreteSACSettings(ObsGroupSettings, TDSettings):
    """The settings of SAC for discrete actions."""

    learning_rate_q: LearningRate = 3e-4
    """Adam's learning rate for the critics."""
    learning_rate_policy: LearningRate = 3e-4
    """Adam's learning rate for the actor."""
    learning_rate_alpha: LearningRate = 3e-4
    """Adam's learning rate for the temperature."""
    alpha: Positive = 1.0
    """The temperature, or the first one if it is tuned."""
    auto_alpha: bool = True
    """Whether to tune the temperature."""
    target_entropy_ratio: Fraction = 0.98
    """Entropy that the temperature aims at, as a fraction of the largest possible one."""
    target_tau: Fraction = 0.005
    """Fraction of the way that the target critics move per update."""


@POLICY_REGISTRY.register("discrete_sac")
class DiscreteSACPolicy(TDPolicy):
    """Discrete SAC (Christodoulou, "Soft Actor-Critic for Discrete Action Settings", 2019).

    As :class:`SACPolicy`, for one discrete choice. The critics give every action a value, so that
    expectations over the policy are sums over the actions: the soft value of the next state
    (equation 10), the loss of the actor (equation 12) and that of the temperature (equation 11). An
    update therefore draws nothing. The sums are over the allowed actions only, and the temperature
    aims at 0.98 (``target_entropy_ratio``) of the largest entropy, the logarithm of the number of
    allowed actions.

    The paper has the same ratio. It keeps the policy nearly uniform, so where few actions are good,
    a lower ratio learns more. Difference from the paper: as in the code of SAC's authors, the loss
    of the temperature has its logarithm in place of the temperature.

    Learns from the columns ``obs``, ``action`` int64, ``reward``, ``next_obs``, ``terminated``, and
    ``discount`` and ``weight`` where there are any, as :class:`DQNPolicy` does. Evaluating takes
    the most likely action, or, with ``deterministic=False``, draws one.
    """

    cfg: DiscreteSACSettings
    actor: Component[nn.Module]
    critic: Component[nn.Module]
    temperature: Component[Temperature]
    reports = (*TDPolicy.reports, "critic_loss", "policy_loss", "entropy", "alpha")
    model_type: ClassVar[str] = "discrete_actor_q"

    action_kinds: ClassVar[tuple[str, ...]] = ("discrete",)

    def make_components(self) -> dict[str, Component[Any]]:
        """Return the networks, and how each is trained."""
        cfg = self.cfg
        actor, critic = self.submodule("actor"), self.submodule("critic")
        follow = TargetRule(1, cfg.target_tau)
        tuned = adam(cfg.learning_rate_alpha) if cfg.auto_alpha else None
        return {
            "actor": Component(actor, adam(cfg.learning_rate_policy), acts=True),
            "critic": Component(critic, adam(cfg.learning_rate_q), target=follow),
            "temperature": Component(Temperature(cfg.alpha), tuned),
        }

    def check_outputs(self, obs: Value, **inputs: Any) -> None:
        """Refuse an actor or critics of other actions; see :meth:`Policy.check_outputs`."""
        output: dict[str, torch.Tensor] = self.actor.module(obs)
        self.codec.check_outputs(output)
        _values(self.critic.module, obs, output["logit"].shape)

    def update(self, batch: Columns) -> dict[str, torch.Tensor]:
        """Make one update; see :meth:`Policy.update`."""
        obs, next_obs = batch["obs"], batch["next_obs"]
        mask = mask_of(obs, batch.get("action_mask"))
        log_alpha = self.temperature.module.log_alpha
        alpha = log_alpha.detach().exp()

        with torch.no_grad():
            next_mask = mask_of(next_obs, batch.get("next_action_mask"))
            prob, log_prob = self._probabilities(next_obs, next_mask)
            next_q = _values(self.critic.target, next_obs, prob.shape).amin(0)
            target = self.td_target(batch, (prob * (next_q - alpha * log_prob)).sum(-1))
        values = _values(self.critic.module, obs, prob.shape)
        action = self.codec.to_raw(batch["action"]).expand(len(values), -1)
        q = values.gather(-1, action.unsqueeze(-1)).squeeze(-1)
        squares, td_error = ensemble_td_loss(q, target, weight=batch.get("weight"))
        critic_loss = 0.5 * squares
        self.critic.step(critic_loss)

        prob, log_prob = self._probabilities(obs, mask)
        with torch.no_grad():
            value = _values(self.critic.module, obs, prob.shape).amin(0)
        actor_loss = (prob * (alpha * log_prob - value)).sum(-1).mean()
        self.actor.step(actor_loss)

        entropy = -(prob * log_prob).sum(-1).detach()
        if self.cfg.auto_alpha:
            largest = _largest_entropy(log_prob.shape[-1], mask)
            aim = self.cfg.target_entropy_ratio * largest
            self.temperature.step(log_alpha * (entropy - aim).mean())
        output = {
            "total_loss": critic_loss + actor_loss,
            "critic_loss": critic_loss,
            "policy_loss": actor_loss,
            "q_value": q.mean(),
            "target_q_value": target.mean(),
            "td_error": td_error.mean(),
            "entropy": entropy.mean(),
            "alpha": alpha,
        }
        if "weight" in batch or self.cfg.priority:
            output["priority"] = td_error
        return {name: column.detach() for name, column in output.items()}

    def _probabilities(
        self, obs: Value, mask: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the probabilities of actions ``[B, A]`` and their logarithms; both 0 if forbidden.

        So a sum over all actions is one over the allowed actions.
        """
        output: dict[str, torch.Tensor] = self.actor.module(obs)
        log_prob = Categorical(output["logit"], mask).log_probs
        prob = log_prob.exp()
        return prob, log_prob.masked_fill(prob == 0, 0.0)


def _values(critic: nn.Module, obs: Value, rows: Sequence[int]) -> torch.Tensor:
    """Return ``[n_critics, B, A]``, the values of all actions, if they have the ``rows [B, A]``."""
    return with_rows(critic(obs), ("n_critics", *rows), what="of the critics")


def _largest_entropy(n_actions: int, mask: torch.Tensor | None) -> torch.Tensor | float:
    """Return the entropy of the uniform distribution over the allowed actions, ``[B]``.

    A mask that allows nothing counts as one that allows everything.
    """
    if mask is None:
        return math.log(n_actions)
    n_allowed = mask.sum(-1)
    return n_allowed.masked_fill(n_allowed == 0, n_actions).log()
