"""Soft actor-critic."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Self, Unpack

import torch
from torch import nn

from dmiddleware.config import Option, count, fraction, number, optional, positive, switch
from dmiddleware.model.spaces import HasSpaces
from dmiddleware.policy.actions import ACTION_OPTIONS, ActionOptions, only_bounding
from dmiddleware.policy.component import Component, TargetRule, adam
from dmiddleware.policy.network_outputs import critic_values
from dmiddleware.policy.obs_norm import OBS_NORM_OPTIONS, ObsNormOptions
from dmiddleware.policy.options import COLLECT_OPTIONS, LEARNING_RATE, TDOptions
from dmiddleware.policy.policy import MODES, Mode
from dmiddleware.policy.policy_registry import POLICY_REGISTRY
from dmiddleware.policy.td import TDPolicy
from dmiddleware.rl import TanhGaussian, ensemble_td_loss
from dmiddleware.schedule import Schedule
from dmiddleware.tree import Value

__all__ = ["SACOptions", "SACPolicy"]


class SACOptions(ActionOptions, ObsNormOptions, TDOptions, total=False):
    """The options of :meth:`SACPolicy.for_env`."""

    learning_rate_q: float | Schedule
    learning_rate_policy: float | Schedule
    learning_rate_alpha: float | Schedule
    alpha: float
    auto_alpha: bool
    target_entropy: float | None
    target_tau: float


class Temperature(nn.Module):
    """The weight of the entropy, positive because its logarithm is learned.

    Args:
        alpha: the first weight.
    """

    def __init__(self, alpha: float) -> None:
        super().__init__()
        self.log_alpha = nn.Parameter(torch.tensor(alpha).log())


@POLICY_REGISTRY.register("sac")
class SACPolicy(TDPolicy):
    """Soft actor-critic (Haarnoja et al., "Soft Actor-Critic Algorithms and Applications", 2018).

    Two critics learn the soft Q-function (equation 5) towards the smaller of their targets; the
    actor maximises it together with the entropy (equation 7); the temperature is tuned so that the
    entropy stays near a target (equation 18), or fixed. Differences from the paper: the temperature
    is learned as its logarithm, and the loss has that logarithm in place of the temperature, as in
    the authors' own code.

    Learns from the columns ``obs``, ``action``, ``reward``, ``next_obs``, ``terminated``, and
    ``discount`` and ``weight`` where there are any, as :class:`DQNPolicy` does. Actions are a Box
    of any shape.
    """

    config: ClassVar[dict[str, Any]] = {
        **OBS_NORM_OPTIONS,
        **ACTION_OPTIONS,
        "action_bounding": only_bounding(
            "tanh", "actions are the tanh of what the actor returns, mapped to the bounds"
        ),
        "learn": {
            "batch_size": Option(256, count, "rows per update"),
            "update_per_collect": Option(1, count, "updates after each collection", keyword=None),
            "learning_rate_q": Option(3e-4, LEARNING_RATE, "learning rate of the critics"),
            "learning_rate_policy": Option(3e-4, LEARNING_RATE, "learning rate of the actor"),
            "learning_rate_alpha": Option(3e-4, LEARNING_RATE, "learning rate of the temperature"),
            "alpha": Option(1.0, positive, "the temperature, or the first one if it is tuned"),
            "auto_alpha": Option(True, switch, "whether to tune the temperature"),
            "target_entropy": Option(
                None, optional(number), "entropy to aim at; None: minus the number of dimensions"
            ),
            "target_tau": Option(0.005, fraction, "how far the target critics move in an update"),
        },
        "collect": COLLECT_OPTIONS,
    }

    @classmethod
    def for_env(  # type: ignore[override]  # only the options of this algorithm
        cls,
        env: HasSpaces,
        *,
        model: nn.Module | Mapping[str, Any] | None = None,
        modes: Iterable[Mode] = MODES,
        **options: Unpack[SACOptions],
    ) -> Self:
        """Build the policy for an environment, as :meth:`Policy.for_env` describes.

        :doc:`/reference/configuration` lists the options.
        """
        return super().for_env(env, model=model, modes=modes, **options)

    def default_model(self) -> tuple[str, list[str]]:
        """Return the model to build where ``cfg.model`` names none."""
        return "actor_q", ["dmiddleware.model"]

    def make_components(self) -> dict[str, Component]:
        """Return the networks, and how each is trained."""
        learn, rates = self.cfg.learn, self.schedules
        temperature = Temperature(learn.alpha)
        tuned = adam(rates["learn.learning_rate_alpha"]) if learn.auto_alpha else None
        return {
            "actor": Component(
                self.submodule("actor"), adam(rates["learn.learning_rate_policy"]), acts=True
            ),
            "critic": Component(
                self.submodule("critic"),
                adam(rates["learn.learning_rate_q"]),
                target=TargetRule(1, learn.target_tau),
            ),
            "temperature": Component(temperature, tuned),
        }

    def draw(self, batch: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """Return the random numbers of an update."""
        shape = self.codec.to_raw(batch["action"]).shape
        drawn = torch.randn(2, *shape, generator=self.learn_generator).to(self.device)
        return {"noise": drawn[0], "next_noise": drawn[1]}

    def update(
        self,
        batch: Mapping[str, Any],
        *,
        noise: torch.Tensor,
        next_noise: torch.Tensor,
        **drawn: torch.Tensor,
    ) -> dict[str, torch.Tensor]:
        """Make one update; see :meth:`Policy.update`."""
        actor, critic, temperature = (
            self.components[n] for n in ("actor", "critic", "temperature")
        )
        log_alpha = temperature.module.log_alpha
        alpha = log_alpha.detach().exp()

        with torch.no_grad():
            next_action, next_log_prob = self.draw_action(batch["next_obs"], next_noise)
        critic_loss, td_error, logged = self.critic_loss_of(
            batch, next_action, bonus=-alpha * next_log_prob, **drawn
        )
        critic.step(critic_loss)

        chosen, log_prob = self.draw_action(batch["obs"], noise)
        actor_loss = (alpha * log_prob - self.value_of(batch["obs"], chosen)).mean()
        actor.step(actor_loss)

        output = {
            "total_loss": critic_loss + actor_loss,
            "critic_loss": critic_loss,
            "policy_loss": actor_loss,
            **logged,
            "entropy": -log_prob.mean(),
            "alpha": alpha,
        }
        if self.cfg.learn.auto_alpha:
            wanted = self.cfg.learn.target_entropy
            wanted = -float(noise.shape[-1]) if wanted is None else wanted
            temperature.step(-(log_alpha * (log_prob.detach() + wanted).mean()))
        if "weight" in batch or self.cfg.priority:
            output["priority"] = td_error
        return {name: value.detach() for name, value in output.items()}

    def critic_loss_of(
        self, batch: Mapping[str, Any], next_action: torch.Tensor, *, bonus: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        """Return the critics' loss, the priorities ``[B]``, and what to log.

        Args:
            batch: the columns.
            next_action: ``[B, A]``, drawn for the next observations.
            bonus: ``[B]``, what the entropy adds to their values.
        """
        critic = self.components["critic"]
        with torch.no_grad():
            next_value = self.critics(critic.target, batch["next_obs"], next_action)
            next_value = next_value.amin(0) + bonus
        q = self.critics(critic.module, batch["obs"], self.codec.to_raw(batch["action"]))
        loss, td_error = ensemble_td_loss(
            q, self.td_target(batch, next_value), weight=batch.get("weight")
        )
        return 0.5 * loss, td_error, {"q_value": q.mean()}

    def value_of(self, obs: Value, action: torch.Tensor) -> torch.Tensor:
        """Return ``[B]``, the value of actions ``[B, A]`` that the actor maximises."""
        return self.critics(self.components["critic"].module, obs, action).amin(0)

    def critics(self, critic: nn.Module, obs: Value, action: torch.Tensor) -> torch.Tensor:
        """Return ``[n_critics, B]``, the values of actions ``[B, A]`` by critics or targets."""
        return critic_values(critic(obs, action), len(action))

    def draw_action(self, obs: Value, noise: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return actions ``[B, A]`` that noise makes of observations, and their log-densities."""
        output = self.components["actor"].module(obs)
        distribution = TanhGaussian(output["mu"], output["sigma"])
        action = distribution.rsample(noise=noise)
        return action, distribution.log_prob(action)
