"""Weighted QMIX."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import torch
from torch import nn

from dmiddleware.policy.action_codec import mask_of
from dmiddleware.policy.agents import present_agents
from dmiddleware.policy.component import Component, TargetRule, adam
from dmiddleware.policy.policy_registry import POLICY_REGISTRY
from dmiddleware.policy.qmix import VDNPolicy, VDNSettings, mixed_value
from dmiddleware.rl import mask_logit, taken_rows, weighted_mean
from dmiddleware.settings import Fraction
from dmiddleware.tree import Columns, Value

__all__ = ["WQMIXPolicy", "WQMIXSettings"]


class WQMIXSettings(VDNSettings):
    """The settings of weighted QMIX."""

    double: Literal[True] = True
    """The central network judges the actions that the monotonic one chooses."""
    weighting: Literal["optimistic", "central"] = "optimistic"
    """Which joint actions count fully: those whose value is too low (OW-QMIX), or those that may be
    the best (CW-QMIX)."""
    alpha: Fraction = 0.5
    """α, the weight of all others."""


@POLICY_REGISTRY.register("wqmix")
class WQMIXPolicy(VDNPolicy):
    """Weighted QMIX (Rashid et al., "Weighted QMIX", 2020), for cooperating agents.

    A monotonic mixture cannot represent the values of all joint actions, and QMIX spreads its error
    over all of them, so a good joint action next to bad ones may get too low a value. Here, a
    central network without that restriction learns the values, and its targets; the monotonic one
    learns the same targets, and joint actions that are not the best count less (sections 4 and 5):

    - OW-QMIX, ``weighting="optimistic"``: full weight where the value is below the target, else α;
    - CW-QMIX, ``weighting="central"``: full weight where each agent took its best action, or the
      target is above the central value of these, else α.

    With α = 1, both are QMIX with central targets. In targets, the target copy of the central
    network judges the joint action that is the best by the monotonic one.

    Differences from the paper: agents have no memory (:class:`RecurrentQMIXPolicy` is QMIX with
    one), and the optimizer is Adam instead of RMSprop.

    Learns from the columns of :class:`VDNPolicy`.
    """

    cfg: WQMIXSettings
    central: Component[nn.Module]
    reports: ClassVar[tuple[str, ...]] = (*VDNPolicy.reports, "central_loss")
    model_type: ClassVar[str] = "wqmix_network"

    def make_components(self) -> dict[str, Component[Any]]:
        """Return the networks, and how each is trained."""
        cfg = self.cfg
        q, central = self.submodule("q"), self.submodule("central")
        optimizer, clip = adam(cfg.learning_rate, eps=cfg.adam_eps), cfg.grad_clip_norm
        follow = TargetRule(cfg.target_update_freq, cfg.target_tau)
        return {
            "q": Component(q, optimizer, grad_clip_norm=clip),
            "central": Component(central, optimizer, target=follow, grad_clip_norm=clip),
            "agent": Component(q.get_submodule("agent"), acts=True),
        }

    def update(self, batch: Columns, **inputs: Any) -> dict[str, torch.Tensor]:
        """Make one update; see :meth:`Policy.update`."""
        obs, action = batch["obs"], self.codec.to_raw(batch["action"])
        target = self._target(batch)
        logit = self.values_of(self.q.module(obs), action.shape)
        error = mixed_value(self.q.module, taken_rows(logit, action), obs) - target
        if self.cfg.weighting == "optimistic":
            counts = error.detach() < 0
        else:
            counts = self._may_be_best(obs, action, logit.detach(), target)
        weight = torch.where(counts, 1.0, self.cfg.alpha)
        loss = weighted_mean(weight * error.square(), batch.get("weight"))
        norm = self.q.step(loss)
        central_error = self._central_value(self.central.module, obs, action) - target
        central_loss = weighted_mean(central_error.square(), batch.get("weight"))
        self.central.step(central_loss)
        absolute, mean_target = error.detach().abs(), target.mean()
        answer = {
            "total_loss": loss.detach(),
            "central_loss": central_loss.detach(),
            "q_value": mean_target + error.detach().mean(),
            "target_q_value": mean_target,
            "td_error": absolute.mean(),
        }
        if self.cfg.grad_clip_norm is not None:
            answer["grad_norm"] = norm
        if "weight" in batch or self.cfg.priority:
            answer["priority"] = absolute
        return answer

    @torch.no_grad()
    def _target(self, batch: Columns) -> torch.Tensor:
        """Return ``[B]``, the reward and what the central network says of the best next actions."""
        next_obs = batch["next_obs"]
        self.set_training(False)  # so that the choice updates no batch statistics
        ranking: torch.Tensor = self.q.module(next_obs)["logit"]
        self.set_training(True)
        mask = mask_of(next_obs, batch.get("next_action_mask"))
        best = mask_logit(ranking, mask).argmax(-1)
        value = self._central_value(self.central.target, next_obs, best)
        columns: dict[str, Any] = {**batch, "reward": batch["reward"].mean(-1)}
        return self.td_target(columns, value)

    @torch.no_grad()
    def _may_be_best(
        self, obs: Value, action: torch.Tensor, logit: torch.Tensor, target: torch.Tensor
    ) -> torch.Tensor:
        """Return ``[B]`` bool: whether actions are the best known ones, or seem even better."""
        best = mask_logit(logit, mask_of(obs, None)).argmax(-1)
        is_best = ((action == best) | ~present_agents(obs)).all(-1)
        return is_best | (target > self._central_value(self.central.module, obs, best))

    def _central_value(self, network: Any, obs: Value, action: torch.Tensor) -> torch.Tensor:
        """Return ``[B]``, a central network's values of joint actions ``[B, A]``."""
        return mixed_value(network, taken_rows(network(obs)["logit"], action), obs)
