"""Implicit Q-learning."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Self, Unpack

import torch
from torch import nn

from dmiddleware.config import (
    Option,
    Range,
    at_least,
    count,
    fraction,
    positive,
)
from dmiddleware.model.spaces import HasSpaces
from dmiddleware.policy.actions import ACTION_OPTIONS, ActionOptions, only_bounding
from dmiddleware.policy.component import Component, TargetRule, adam
from dmiddleware.policy.network_outputs import critic_values, values_of_rows
from dmiddleware.policy.options import (
    COLLECT_OPTIONS,
    LEARNING_RATE,
    TD_COLUMNS,
    TD_OPTIONS,
)
from dmiddleware.policy.policy import MODES, Mode, Policy, PolicyOptions
from dmiddleware.policy.policy_registry import POLICY_REGISTRY
from dmiddleware.rl import ensemble_td_loss, td_target
from dmiddleware.schedule import Schedule

__all__ = ["IQLOptions", "IQLPolicy"]

_EXPECTILE = Range(
    "a number above 0 and below 1", lambda value: fraction.fits(value) and 0 < value < 1
)


class IQLOptions(ActionOptions, PolicyOptions, total=False):
    """The options of :meth:`IQLPolicy.for_env`."""

    discount_factor: float
    batch_size: int
    learning_rate_actor: float | Schedule
    learning_rate_critic: float | Schedule
    learning_rate_value: float | Schedule
    expectile: float
    inverse_temperature: float
    max_advantage_weight: float
    target_tau: float
    n_sample: int | None
    n_episode: int | None


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

    config: ClassVar[dict[str, Any]] = {
        **ACTION_OPTIONS,
        "action_bounding": only_bounding(
            "rescale", "the mean of the actor is bounded already, and is mapped to the bounds"
        ),
        "discount_factor": TD_OPTIONS["discount_factor"],
        "learn": {
            "batch_size": Option(256, count, "rows per update"),
            "update_per_collect": Option(1, count, "updates after each collection", keyword=None),
            "learning_rate_actor": Option(
                3e-4, LEARNING_RATE, "Adam's learning rate for the actor"
            ),
            "learning_rate_critic": Option(
                3e-4, LEARNING_RATE, "Adam's learning rate for the critics"
            ),
            "learning_rate_value": Option(
                3e-4, LEARNING_RATE, "Adam's learning rate for the state value"
            ),
            "expectile": Option(
                0.7, _EXPECTILE, "τ, the expectile of the state value: 0.5 is the mean, 1 the best"
            ),
            "inverse_temperature": Option(
                3.0, at_least(0), "β, how strongly advantages count in cloning; 0 clones all alike"
            ),
            "max_advantage_weight": Option(
                100.0, positive, "largest weight of an action that is cloned"
            ),
            "target_tau": Option(
                0.005, fraction, "fraction of the way that the target critics move per update"
            ),
        },
        "collect": COLLECT_OPTIONS,
    }
    learn_columns: ClassVar[tuple[str, ...]] = TD_COLUMNS

    @classmethod
    def for_env(  # type: ignore[override]  # only the options of this algorithm
        cls,
        env: HasSpaces,
        *,
        model: nn.Module | Mapping[str, Any] | None = None,
        modes: Iterable[Mode] = MODES,
        **options: Unpack[IQLOptions],
    ) -> Self:
        """Build the policy for an environment, as :meth:`Policy.for_env` describes.

        A Minari dataset serves as the environment, because it has the same spaces.
        :doc:`/reference/configuration` lists the options.
        """
        return super().for_env(env, model=model, modes=modes, **options)

    def default_model(self) -> tuple[str, list[str]]:
        """Return the model to build where ``cfg.model`` names none."""
        return "actor_qv", ["dmiddleware.model"]

    def make_components(self) -> dict[str, Component]:
        """Return the networks, and how each is trained."""
        rates = self.schedules

        def part(name: str, **options: Any) -> Component:
            rate = rates[f"learn.learning_rate_{name}"]
            return Component(self.submodule(name), adam(rate), **options)

        return {
            "actor": part("actor", acts=True),
            "critic": part("critic", target=TargetRule(1, self.cfg.learn.target_tau)),
            "value": part("value"),
        }

    def update(self, batch: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """Make one update; see :meth:`Policy.update`."""
        learn = self.cfg.learn
        actor, critic, value = (self.components[name] for name in ("actor", "critic", "value"))
        obs, action = batch["obs"], self.codec.to_raw(batch["action"])

        with torch.no_grad():
            q = critic_values(critic.target(obs, action), len(action)).amin(0)
        value_loss = expectile_loss(q - values_of_rows(value.module(obs), q.shape), learn.expectile)
        value.step(value_loss)

        with torch.no_grad():
            advantage = q - values_of_rows(value.module(obs), q.shape)
            weight = (learn.inverse_temperature * advantage).exp()
            weight = weight.clamp(max=learn.max_advantage_weight)
        log_prob = self.codec.distribution(actor.module(obs)).log_prob(action)
        actor_loss = -(weight * log_prob).mean()
        actor.step(actor_loss)

        with torch.no_grad():
            next_value = values_of_rows(value.module(batch["next_obs"]), q.shape)
        target = td_target(
            next_value, batch["reward"], batch["terminated"], discount=self.cfg.discount_factor
        )
        learned = critic_values(critic.module(obs, action), len(action))
        critic_loss = ensemble_td_loss(learned, target).loss
        critic.step(critic_loss)
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
    """Return the mean of ``|τ - 1(u < 0)| u²``, which the τ-expectile minimises.

    Source: Kostrikov et al. (2021), section 4.1.

    Args:
        difference: ``[B]`` the samples ``u``, relative to the estimate.
        expectile: τ, between 0 and 1.
    """
    weight = torch.where(difference < 0, 1.0 - expectile, expectile)
    return (weight * difference.square()).mean()
