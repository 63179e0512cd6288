"""Parametrized deep Q-learning."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import nn

from dmiddleware.policy.action_codec import ActorSettings, mask_of
from dmiddleware.policy.component import Component, TargetRule, adam
from dmiddleware.policy.network_outputs import with_rows
from dmiddleware.policy.policy_registry import POLICY_REGISTRY
from dmiddleware.policy.q_learning import Epsilon
from dmiddleware.policy.td import TDPolicy, TDSettings
from dmiddleware.rl import epsilon_greedy, mask_logit, td_loss
from dmiddleware.schedule import LearningRate, Schedule
from dmiddleware.settings import Fraction, NonNegative
from dmiddleware.tree import Columns, Nested, Value, leaves_by_path, nest

__all__ = ["PDQNPolicy", "PDQNSettings"]


class PDQNSettings(ActorSettings, TDSettings):
    """The settings of P-DQN."""

    action_bounding: Literal["rescale"] = "rescale"
    """The numbers of the actor are bounded already, and are mapped to the bounds."""
    learning_rate_critic: LearningRate = 1e-3
    """Adam's learning rate for the critic."""
    learning_rate_actor: LearningRate = 1e-4
    """Adam's learning rate for the actor, which the paper's analysis has below the critic's."""
    target_tau: Fraction = 0.005
    """Fraction of the way that the target networks move per update."""
    eps: Epsilon = Schedule.linear(1.0, 0.05, decay=10_000)
    """ε of the choices that explore while collecting."""
    noise_sigma: NonNegative = 0.1
    """Standard deviation of the noise on collected numbers; 1 is half of the Box."""


@POLICY_REGISTRY.register("pdqn")
class PDQNPolicy(TDPolicy):
    """P-DQN (Xiong et al., "Parametrized Deep Q-Networks Learning", 2018), for hybrid actions.

    An action is a choice and the numbers that come with it, such as a kick with its direction. A
    deterministic actor returns the numbers of all choices, and a critic the values of all choices
    with these numbers. The critic learns as in Q-learning (equations 3.4 and 5.2), and the actor
    maximizes the sum of the values (equation 5.3).

    Differences from the paper: both networks have targets that track them, as in DDPG; numbers
    explore by Gaussian noise; each update draws rows of a replay buffer, and n-step returns are
    those of ``n_step``; and every choice sees the numbers of all choices.

    Learns from the columns ``obs``, ``action``, ``reward``, ``next_obs``, ``terminated``, and
    ``discount`` and ``weight`` where there are any, as :class:`DQNPolicy` does. Actions are a Dict
    or Tuple of one Discrete space and at least one Box. Choices that a mask forbids are neither
    taken nor bootstrapped from. Collecting takes the keyword ``eps``, the probability of a random
    choice.
    """

    cfg: PDQNSettings
    actor: Component[nn.Module]
    critic: Component[nn.Module]
    reports = (*TDPolicy.reports, "critic_loss", "actor_loss")
    model_type: ClassVar[str] = "hybrid_q"
    explores = False

    def make_components(self) -> dict[str, Component[Any]]:
        """Return the networks, and how each is trained."""
        cfg, follow = self.cfg, TargetRule(1, self.cfg.target_tau)
        actor, critic = self.submodule("actor"), self.submodule("critic")
        return {
            "actor": Component(actor, adam(cfg.learning_rate_actor), target=follow, acts=True),
            "critic": Component(critic, adam(cfg.learning_rate_critic), target=follow, acts=True),
        }

    def check_outputs(self, obs: Value, **inputs: Any) -> None:
        """Refuse an actor or a critic of other actions; see :meth:`Policy.check_outputs`."""
        self.codec.check_outputs(self.actor_output(obs))

    def update(self, batch: Columns) -> dict[str, torch.Tensor]:
        """Make one update; see :meth:`Policy.update`."""
        obs: Value = batch["obs"]
        next_obs: Value = batch["next_obs"]
        choice, numbers = self.split(batch["action"])

        with torch.no_grad():
            next_numbers: torch.Tensor = self.actor.target(next_obs)["mu"]
            next_q = _values(self.critic.target, next_obs, next_numbers)
            mask = mask_of(next_obs, batch.get("next_action_mask"))
            target = self.td_target(batch, mask_logit(next_q, mask).amax(-1))
        q = _values(self.critic.module, obs, numbers)
        critic_loss, td_error = td_loss(
            q, choice, target, weight=batch.get("weight"), criterion="mse"
        )
        self.critic.step(critic_loss)

        chosen: torch.Tensor = self.actor.module(obs)["mu"]
        actor_loss = -_values(self.critic.module, obs, chosen).sum(-1).mean()
        self.actor.step(actor_loss)

        error = td_error.abs()
        output = {
            "total_loss": critic_loss + actor_loss,
            "critic_loss": critic_loss,
            "actor_loss": actor_loss,
            "q_value": target.mean() - td_error.mean(),
            "target_q_value": target.mean(),
            "td_error": error.mean(),
        }
        if "weight" in batch or self.cfg.priority:
            output["priority"] = error
        return {name: value.detach() for name, value in output.items()}

    def split(self, action: Nested) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the choices ``[B]`` of the env's actions, and all their raw numbers ``[B, A]``."""
        parts: dict[str, torch.Tensor] = leaves_by_path(self.codec.to_raw(action))
        (choice,) = (part for part in parts.values() if not part.is_floating_point())
        numbers = [part for part in parts.values() if part.is_floating_point()]
        return choice, torch.cat(numbers, -1)

    def actor_output(self, obs: Value) -> dict[str, torch.Tensor]:
        """Return ``logit``, the values of the choices, and their numbers ``mu``."""
        numbers: torch.Tensor = self.actor.module(obs)["mu"]
        return {"logit": _values(self.critic.module, obs, numbers), "mu": numbers}

    def act_collect(  # type: ignore[override]  # takes no other keywords
        self,
        obs: Value,
        env_id: np.ndarray,
        *,
        eps: float = 0.0,
        action_mask: Nested | None = None,
    ) -> dict[str, Any]:
        """Choose at random with the probability ``eps``, and add noise to the numbers."""
        output, mask = self.actor_output(obs), mask_of(obs, action_mask)
        if self.on_gpu:
            output = {name: column.to(self.draw_device) for name, column in output.items()}
            mask = None if mask is None else mask.to(self.draw_device)
        choice = epsilon_greedy(output["logit"], eps, generator=self.generator, mask=mask)
        noise = torch.randn(
            output["mu"].shape, generator=self.generator, device=output["mu"].device
        )
        output["mu"] = output["mu"] + self.cfg.noise_sigma * noise
        greedy: dict[str, torch.Tensor] = leaves_by_path(self.codec.distribution(output).mode())
        raw = {name: part if part.is_floating_point() else choice for name, part in greedy.items()}
        return {"action": self.codec.to_env(nest(raw))}

    def act_eval(  # type: ignore[override]  # takes no other keywords
        self, obs: Value, env_id: np.ndarray, *, action_mask: Nested | None = None
    ) -> dict[str, Any]:
        """Take the choice of the highest value; see :meth:`Policy.act_eval`."""
        return self.acted(self.actor_output(obs), obs, action_mask, None)


def _values(critic: nn.Module, obs: Value, numbers: torch.Tensor) -> torch.Tensor:
    """Return the values ``[B, K]`` of all choices with their numbers ``[B, A]``."""
    q: torch.Tensor = critic(obs, numbers)
    return with_rows(q, (numbers.shape[0], "n_choices"), what="of the critic")
