"""Implicit Q-learning."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import torch
from annotated_types import Gt, Lt
from torch import nn

from dmiddleware.policy.action_codec import ActorSettings
from dmiddleware.policy.component import Component, TargetRule, adam
from dmiddleware.policy.network_outputs import critic_values, values_of_rows
from dmiddleware.policy.obs_groups import ObsGroupSettings
from dmiddleware.policy.policy import Policy
from dmiddleware.policy.policy_registry import POLICY_REGISTRY
from dmiddleware.policy.policy_settings import DiscountedSettings
from dmiddleware.policy.td import TD_COLUMNS
from dmiddleware.rl import ensemble_td_loss, td_target
from dmiddleware.schedule import LearningRate
from dmiddleware.settings import Fraction, NonNegative, Positive
from dmiddleware.tree import Columns, Value

__all__ = ["IQLPolicy", "IQLSettings"]


class IQLSettings(ObsGroupSettings, ActorSettings, DiscountedSettings):
    """The settings of IQL."""

    batch_size = 256
    action_bounding: Literal["rescale"] = "rescale"
    """The mean of the actor is bounded already, and is mapped to the bounds."""
    learning_rate_actor: LearningRate = 3e-4
    """Adam's learning rate for the actor."""
    learning_rate_critic: LearningRate = 3e-4
    """Adam's learning rate for the critics."""
    learning_rate_value: LearningRate = 3e-4
    """Adam's learning rate for the state value."""
    expectile: Annotated[float, Gt(0), Lt(1)] = 0.7
    """τ, the expectile of the state value: 0.5 is the mean, 1 the best."""
    inverse_temperature: NonNegative = 3.0
    """β, how strongly advantages count in cloning; 0 clones all alike."""
    max_advantage_weight: Positive = 100.0
    """Largest weight of an action that is cloned."""
    target_tau: Fraction = 0.005
    """Fraction of the way that the target critics move per update."""


@POLICY_REGISTRY.register("iql")
class IQLPolicy(Policy):
    """IQL (Kostrikov et al., "Offline Reinforcement Learning with Implicit Q-Learning", 2021).

    A state value learns an upper expectile of the values of the actions in the data (equation 5),
    so it approaches the best of them without asking for the value of any other action. The critics
    learn towards it (equation 6), and the actor clones the actions of the data, weighted by how
    much better than the state they are (equation 7). As in the authors' own code, each of the three
    steps uses the outcome of the step before, in the order value, actor, critics, and the weights
    are limited. Difference from that code: the actor's learning rate is constant by default, and
    does not fall along a cosine; ``learning_rate_actor`` may be such a schedule.

    Learns from the columns ``obs``, ``action``, ``reward``, ``next_obs`` and ``terminated``, and
    needs no environment. Actions are a Box of any shape.
    """

    cfg: IQLSettings
    actor: Component[nn.Module]
    critic: Component[nn.Module]
    value: Component[nn.Module]
    reports: ClassVar[tuple[str, ...]] = (
        "total_loss",
        "value_loss",
        "policy_loss",
        "critic_loss",
        "q_value",
        "advantage",
        "advantage_weight",
        "cur_lr",
    )
    model_type: ClassVar[str] = "actor_qv"

    action_kinds: ClassVar[tuple[str, ...]] = ("continuous",)
    learn_columns: ClassVar[tuple[str, ...]] = TD_COLUMNS

    def make_components(self) -> dict[str, Component[Any]]:
        """Return the networks, and how each is trained."""
        cfg = self.cfg
        actor, critic, value = (self.submodule(name) for name in ("actor", "critic", "value"))
        follow = TargetRule(1, cfg.target_tau)
        return {
            "actor": Component(actor, adam(cfg.learning_rate_actor), acts=True),
            "critic": Component(critic, adam(cfg.learning_rate_critic), target=follow),
            "value": Component(value, adam(cfg.learning_rate_value)),
        }

    def check_outputs(self, obs: Value, **inputs: Any) -> None:
        """Refuse an actor without draws, or critics of other actions."""
        output: dict[str, torch.Tensor] = self.actor.module(obs)
        self.codec.check_outputs(output, draws=True)
        mu = output["mu"]
        critic_values(self.critic.module(obs, torch.zeros_like(mu)), len(mu))
        values_of_rows(self.value.module(obs), (len(mu),))

    def update(self, batch: Columns) -> dict[str, torch.Tensor]:
        """Make one update; see :meth:`Policy.update`."""
        cfg = self.cfg
        obs, action = batch["obs"], self.codec.to_raw(batch["action"])

        with torch.no_grad():
            q = critic_values(self.critic.target(obs, action), len(action)).amin(0)
        value = values_of_rows(self.value.module(obs), q.shape)
        value_loss = expectile_loss(q - value, cfg.expectile)
        self.value.step(value_loss)

        with torch.no_grad():
            advantage = q - values_of_rows(self.value.module(obs), q.shape)
            weight = (cfg.inverse_temperature * advantage).exp()
            weight = weight.clamp(max=cfg.max_advantage_weight)
        log_prob = self.codec.distribution(self.actor.module(obs)).log_prob(action)
        actor_loss = -(weight * log_prob).mean()
        self.actor.step(actor_loss)

        with torch.no_grad():
            next_value = values_of_rows(self.value.module(batch["next_obs"]), q.shape)
        target = td_target(
            next_value, batch["reward"], batch["terminated"], discount=self.cfg.discount
        )
        learned = critic_values(self.critic.module(obs, action), len(action))
        critic_loss = ensemble_td_loss(learned, target).loss
        self.critic.step(critic_loss)
        return {
            "total_loss": (value_loss + actor_loss + critic_loss).detach(),
            "value_loss": value_loss.detach(),
            "policy_loss": actor_loss.detach(),
            "critic_loss": critic_loss.detach(),
            "q_value": q.mean(),
            "advantage": advantage.mean(),
            "advantage_weight": weight.mean(),
        }


def expectile_loss(difference: torch.Tensor, expectile: float) -> torch.Tensor:
    """Return the mean of ``|τ - 1(u < 0)| u²``, which the τ-expectile minimizes.

    Source: Kostrikov et al. (2021), section 4.1.

    Args:
        difference: ``[B]`` the samples ``u``, relative to the estimate.
        expectile: τ, between 0 and 1.
    """
    weight = torch.where(difference < 0, 1.0 - expectile, expectile)
    return (weight * difference.square()).mean()
