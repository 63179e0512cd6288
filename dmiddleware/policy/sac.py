"""Soft actor-critic."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Self, Unpack

import numpy as np
import torch
from torch import nn

from dmiddleware.config import Option, count, fraction, number, optional, positive, switch
from dmiddleware.data.batch import Value
from dmiddleware.model.spaces import HasSpaces
from dmiddleware.policy.base.actions import ActorOptions, ActorPolicy
from dmiddleware.policy.base.command import CommandModePolicy
from dmiddleware.policy.base.common_options import (
    COLLECT_OPTIONS,
    TD_COLUMNS,
    TD_OPTIONS,
    TDOptions,
)
from dmiddleware.policy.base.parts import Part, TargetRule, adam
from dmiddleware.policy.policy_registry import POLICY_REGISTRY
from dmiddleware.rl import TanhGaussian
from dmiddleware.schedule import Schedule, scheduled

__all__ = ["SACOptions", "SACPolicy"]


class SACOptions(ActorOptions, TDOptions, total=False):
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


@POLICY_REGISTRY.register("sac_command")
@POLICY_REGISTRY.register("sac")
class SACPolicy(ActorPolicy, CommandModePolicy):
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
        **TD_OPTIONS,
        "action_bounding": "tanh",
        "learn": {
            "batch_size": Option(256, count, "rows per update"),
            "update_per_collect": Option(1, count, "updates after each collection", keyword=None),
            "learning_rate_q": Option(
                3e-4, scheduled(positive), "Adam's learning rate for the critics"
            ),
            "learning_rate_policy": Option(
                3e-4, scheduled(positive), "Adam's learning rate for the actor"
            ),
            "learning_rate_alpha": Option(
                3e-4, scheduled(positive), "Adam's learning rate for the temperature"
            ),
            "alpha": Option(1.0, positive, "the temperature, or the first one if it is tuned"),
            "auto_alpha": Option(True, switch, "whether to tune the temperature"),
            "target_entropy": Option(
                None,
                optional(number),
                "entropy that the temperature aims at; None: minus the number of dimensions",
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
        enable_field: Iterable[str] | None = None,
        **options: Unpack[SACOptions],
    ) -> Self:
        """Build the policy for an environment, as :meth:`Policy.for_env` describes.

        :doc:`/reference/configuration` lists the options.
        """
        return super().for_env(env, model=model, enable_field=enable_field, **options)

    def default_model(self) -> tuple[str, list[str]]:
        """Return the model to build where ``cfg.model`` names none."""
        return "actor_q", ["dmiddleware.model"]

    def _make_parts(self) -> dict[str, Part]:
        learn, rates, model = self._cfg.learn, self._schedules, self._model
        temperature = Temperature(learn.alpha)
        tuned = adam(rates["learn.learning_rate_alpha"]) if learn.auto_alpha else None
        return {
            **super()._make_parts(),
            "actor": Part(
                model.get_submodule("actor"), adam(rates["learn.learning_rate_policy"]), acts=True
            ),
            "critic": Part(
                model.get_submodule("critic"),
                adam(rates["learn.learning_rate_q"]),
                target=TargetRule(1, learn.target_tau),
            ),
            "temperature": Part(temperature, tuned),
        }

    def _draw(self, batch: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        shape = self._codec.to_raw(batch["action"]).shape
        drawn = torch.randn(2, *shape, generator=self._learn_generator).to(self._device)
        return {"noise": drawn[0], "next_noise": drawn[1]}

    def _update(
        self, batch: Mapping[str, Any], *, noise: torch.Tensor, next_noise: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        actor, critic, temperature = (
            self._parts[name] for name in ("actor", "critic", "temperature")
        )
        log_alpha = temperature.module.log_alpha
        alpha = log_alpha.detach().exp()
        action = self._codec.to_raw(batch["action"])

        with torch.no_grad():
            next_action, next_log_prob = self._drawn(batch["next_obs"], next_noise)
            value = critic.target(batch["next_obs"], next_action).amin(0) - alpha * next_log_prob
            discount = batch.get("discount", self._cfg.discount_factor)
            target = batch["reward"] + discount * value.masked_fill(batch["terminated"], 0.0)
        td_error = critic.module(batch["obs"], action) - target
        squares = td_error.square().sum(0)
        critic_loss = 0.5 * (squares * batch["weight"] if "weight" in batch else squares).mean()
        critic.step(critic_loss)

        chosen, log_prob = self._drawn(batch["obs"], noise)
        actor_loss = (alpha * log_prob - critic.module(batch["obs"], chosen).amin(0)).mean()
        actor.step(actor_loss)

        output = {
            "total_loss": critic_loss + actor_loss,
            "critic_loss": critic_loss,
            "policy_loss": actor_loss,
            "q_value": (td_error + target).mean(),
            "entropy": -log_prob.mean(),
            "alpha": alpha,
        }
        if self._cfg.learn.auto_alpha:
            wanted = self._cfg.learn.target_entropy
            wanted = -float(action.shape[-1]) if wanted is None else wanted
            temperature.step(-(log_alpha * (log_prob.detach() + wanted).mean()))
        if "weight" in batch or self._cfg.priority:
            output["priority"] = td_error.detach().abs().mean(0)
        return {name: value.detach() for name, value in output.items()}

    def _drawn(self, obs: Value, noise: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return actions ``[B, A]`` that noise makes of observations, and their log-densities."""
        output = self._parts["actor"].module(obs)
        distribution = TanhGaussian(output["mu"], output["sigma"])
        action = distribution.rsample(noise=noise)
        return action, distribution.log_prob(action)

    def _forward_collect_batch(
        self, obs: Value, env_id: np.ndarray, **kwargs: Any
    ) -> dict[str, Any]:
        return {"action": self._forward_eval_batch(obs, env_id, deterministic=False)["action"]}

    def _monitor_vars_learn(self) -> list[str]:
        return ["cur_lr", "critic_loss", "policy_loss", "q_value", "entropy", "alpha"]
