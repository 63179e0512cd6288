"""Soft actor-critic."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from dmiddleware.policy.action_codec import ActorSettings
from dmiddleware.policy.component import Component, TargetRule, adam
from dmiddleware.policy.network_outputs import critic_values
from dmiddleware.policy.obs_groups import ObsGroupSettings
from dmiddleware.policy.policy_registry import POLICY_REGISTRY
from dmiddleware.policy.td import TDPolicy, TDSettings
from dmiddleware.policy.temperature import Temperature
from dmiddleware.rl import TanhGaussian, ensemble_td_loss
from dmiddleware.schedule import LearningRate
from dmiddleware.settings import Fraction, Number, Positive
from dmiddleware.tree import Columns, Value

__all__ = ["SACPolicy", "SACSettings"]


class SACSettings(ObsGroupSettings, ActorSettings, TDSettings):
    """The settings of SAC."""

    batch_size = 256
    action_bounding: Literal["tanh"] = "tanh"
    """Actions are the tanh of what the actor returns, mapped to the bounds."""
    learning_rate_q: LearningRate = 3e-4
    """Learning rate of the critics."""
    learning_rate_policy: LearningRate = 3e-4
    """Learning rate of the actor."""
    learning_rate_alpha: LearningRate = 3e-4
    """Learning rate of the temperature."""
    alpha: Positive = 1.0
    """The temperature, or the first one if it is tuned."""
    auto_alpha: bool = True
    """Whether to tune the temperature."""
    target_entropy: Number | None = None
    """Entropy to aim at; None: minus the number of dimensions."""
    target_tau: Fraction = 0.005
    """How far the target critics move in an update."""


@POLICY_REGISTRY.register("sac")
class SACPolicy(TDPolicy):
    """Soft actor-critic (Haarnoja et al., "Soft Actor-Critic Algorithms and Applications", 2018).

    Two critics learn the soft Q-function (equation 5) towards the smaller of their targets; the
    actor maximizes it together with the entropy (equation 7); the temperature is tuned so that the
    entropy stays near a target (equation 18), or fixed. Differences from the paper: the temperature
    is learned as its logarithm, and the loss has that logarithm in place of the temperature, as in
    the authors' own code.

    Learns from the columns ``obs``, ``action``, ``reward``, ``next_obs``, ``terminated``, and
    ``discount`` and ``weight`` where there are any, as :class:`DQNPolicy` does. Actions are a Box
    of any shape.
    """

    cfg: SACSettings
    actor: Component[nn.Module]
    critic: Component[nn.Module]
    temperature: Component[Temperature]
    reports = (*TDPolicy.reports, "critic_loss", "policy_loss", "entropy", "alpha")
    model_type: ClassVar[str] = "actor_q"
    action_kinds: ClassVar[tuple[str, ...]] = ("continuous",)

    def make_components(self) -> dict[str, Component[Any]]:
        """Return the networks, and how each is trained."""
        cfg, follow = self.cfg, TargetRule(1, self.cfg.target_tau)
        tuned = adam(cfg.learning_rate_alpha) if cfg.auto_alpha else None
        return {
            "actor": Component(self.submodule("actor"), adam(cfg.learning_rate_policy), acts=True),
            "critic": Component(self.submodule("critic"), adam(cfg.learning_rate_q), target=follow),
            "temperature": Component(Temperature(cfg.alpha), tuned),
        }

    def check_outputs(self, obs: Value, **inputs: Any) -> None:
        """Refuse an actor without draws, or critics of other actions."""
        output = self.actor_outputs(self.actor.module, obs)
        self.codec.check_outputs(output, draws=True)
        self.value_of(obs, torch.zeros_like(output["mu"]))

    def draw(self, batch: Columns) -> dict[str, Tensor]:
        """Return the random numbers of an update."""
        shape = self.codec.to_raw(batch["action"]).shape
        drawn = torch.randn(2, *shape, generator=self.learn_generator, device=self.draw_device).to(
            self.device
        )
        return {"noise": drawn[0], "next_noise": drawn[1]}

    def update(
        self, batch: Columns, *, noise: Tensor, next_noise: Tensor, **drawn: Tensor
    ) -> dict[str, Tensor]:
        """Make one update; see :meth:`Policy.update`."""
        alpha = self.temperature.module.log_alpha.detach().exp()
        with torch.no_grad():
            next_action, next_log_prob = self.draw_action(batch["next_obs"], next_noise)
        critic_loss, td_error, logged = self.critic_loss_of(
            batch, next_action, bonus=-alpha * next_log_prob, **drawn
        )
        self.critic.step(critic_loss)

        moved = self.move_actor(batch, noise)
        output = {"total_loss": critic_loss + moved["policy_loss"], "critic_loss": critic_loss}
        output |= {**moved, **logged}
        if "weight" in batch or self.cfg.priority:
            output["priority"] = td_error
        return {name: value.detach() for name, value in output.items()}

    def move_actor(self, batch: Columns, noise: Tensor) -> dict[str, Tensor]:
        """Make a step of the actor, and one of the temperature if it is tuned.

        Args:
            batch: the columns.
            noise: ``[B, A]`` standard normal.

        Returns:
            What to log: ``policy_loss``, ``entropy`` and ``alpha``.
        """
        log_alpha = self.temperature.module.log_alpha
        alpha = log_alpha.detach().exp()
        chosen, log_prob = self.draw_action(batch["obs"], noise)
        loss = self.row_mean(alpha * log_prob - self.value_of(batch["obs"], chosen), batch)
        self.actor.step(loss)
        if self.cfg.auto_alpha:
            aim = self.cfg.target_entropy
            aim = -float(noise.shape[-1]) if aim is None else aim
            self.temperature.step(-(log_alpha * self.row_mean(log_prob.detach() + aim, batch)))
        return {"policy_loss": loss, "entropy": -self.row_mean(log_prob, batch), "alpha": alpha}

    def critic_loss_of(
        self, batch: Columns, next_action: Tensor, *, bonus: Tensor
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Return the critics' loss, the priorities ``[B]``, and what to log.

        Args:
            batch: the columns.
            next_action: ``[B, A]``, drawn for the next observations.
            bonus: ``[B]``, what the entropy adds to their values.
        """
        q, next_q = self.critic_outputs(batch, next_action)
        target = self.td_target(batch, next_q.amin(0) + bonus)
        loss, td_error = ensemble_td_loss(q, target, weight=batch.get("weight"))
        logged = self.row_means(batch, q_value=q, target_q_value=target, td_error=td_error)
        return 0.5 * loss, td_error, logged

    def critic_outputs(self, batch: Columns, next_action: Tensor) -> tuple[Tensor, Tensor]:
        """Return ``[n_critics, B]`` twice: the values of the batch, and those that follow.

        Args:
            batch: the columns.
            next_action: ``[B, A]``, drawn for the next observations. Their values are without
                gradient.
        """
        with torch.no_grad():
            next_q = self.critics(self.critic.target, batch["next_obs"], next_action)
        action = self.codec.to_raw(batch["action"])
        return self.critics(self.critic.module, batch["obs"], action), next_q

    def value_of(self, obs: Value, action: Tensor) -> Tensor:
        """Return ``[B]``, the value of actions ``[B, A]`` that the actor maximizes."""
        return self.critics(self.critic.module, obs, action).amin(0)

    def critics(self, critic: nn.Module, obs: Value, action: Tensor) -> Tensor:
        """Return ``[n_critics, B]``, the values of actions ``[B, A]`` by critics or targets."""
        return critic_values(critic(obs, action), action.shape[-2])

    def draw_action(self, obs: Value, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Return actions ``[B, A]`` that noise makes of observations, and their log-densities."""
        output = self.actor_outputs(self.actor.module, obs)
        distribution = TanhGaussian(output["mu"], output["sigma"])
        action = distribution.rsample(noise=noise)
        return action, distribution.log_prob(action)
