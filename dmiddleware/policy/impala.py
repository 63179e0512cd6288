"""IMPALA."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import nn

from dmiddleware.data import MinibatchUnit
from dmiddleware.errors import StructureError
from dmiddleware.policy.actor_critic import (
    ActorCriticPolicy,
    PolicyGradientSettings,
    follow_policy_gradient,
    policy_gradient_component,
)
from dmiddleware.policy.component import Component
from dmiddleware.policy.network_outputs import value_output
from dmiddleware.policy.policy_registry import POLICY_REGISTRY
from dmiddleware.rl import episode_cuts, vtrace
from dmiddleware.schedule import LearningRate
from dmiddleware.settings import Fraction, Positive
from dmiddleware.tree import Batch, Columns

__all__ = ["IMPALAPolicy", "IMPALASettings"]


class IMPALASettings(PolicyGradientSettings):
    """The settings of IMPALA."""

    batch_size = 640
    """Least rows per update, in whole lanes."""
    learning_rate: LearningRate = 6e-4
    trace_decay: Fraction = 1.0
    """λ of V-trace (remark 2)."""
    rho_clip: Positive = 1.0
    """Bound of the ratios ρ, also of the advantages'."""
    c_clip: Positive = 1.0
    """Bound of the ratios c, at most that of ρ."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(
            self.c_clip <= self.rho_clip, "c_clip", f"at most rho_clip, which is {self.rho_clip}"
        )


@POLICY_REGISTRY.register("impala")
class IMPALAPolicy(ActorCriticPolicy):
    """IMPALA (Espeholt et al., "IMPALA: Scalable Distributed Deep-RL", 2018).

    Collectors act with weights that are some updates old. V-trace corrects the targets of the
    values (equation 1) and the advantages (section 4.2) by the ratio of the probabilities that the
    learning and the acting policy give to an action, so nobody has to wait for the newest weights.

    Differences from the paper: losses are averaged over the rows, where the paper adds them up; an
    episode that ends by a time limit bootstraps from its last observation; the default network is
    PPO's.

    One learn forward is one update from whole lanes ``[T, B, …]``: the columns ``obs``, ``action``
    (``raw_action`` where there is one), ``log_prob`` of the policy that acted, ``reward``,
    ``next_obs``, ``terminated``, ``done``, and ``episode_id`` where there is one. It learns from
    collected trajectories as they are, so its chain has no estimator of advantages. All kinds of
    actions are supported; see :class:`ActionCodec`.
    """

    cfg: IMPALASettings
    actor_critic: Component[nn.Module]

    learn_columns: ClassVar[tuple[str, ...]] = (
        "obs",
        "action",
        "log_prob",
        "reward",
        "next_obs",
        "terminated",
        "done",
    )
    optional_columns: ClassVar[tuple[str, ...]] = ("raw_action", "episode_id")
    minibatch_unit: ClassVar[MinibatchUnit] = "lanes"
    learns_from_trajectories: ClassVar[bool] = True

    def check_batch(self, batch: Batch) -> Batch:
        """Refuse rows that are not lanes."""
        if batch["done"].dim() != 2:
            raise StructureError(
                "IMPALA learns from lanes [T, B, …], but the batch has rows "
                f"{tuple(batch['done'].shape)}; use OnPolicyLearner after a StepCollector"
            )
        return batch

    def make_components(self) -> dict[str, Component[Any]]:
        """Return the network."""
        return {"actor_critic": policy_gradient_component(self.model, self.cfg)}

    def update(self, batch: Columns) -> dict[str, torch.Tensor]:
        """Make one update; see :meth:`Policy.update`."""
        cfg = self.cfg
        output: dict[str, torch.Tensor] = self.model(batch["obs"])
        distribution = self.learned_distribution(output, batch)
        log_prob = distribution.log_prob(self.raw_action(batch))
        with torch.no_grad():
            next_value = self.critic_output(batch["next_obs"], n_lead=2)
        value = value_output(output, log_prob.shape)
        target = vtrace(
            batch["reward"],
            value.detach(),
            next_value,
            batch["terminated"],
            episode_cuts(batch),
            log_prob=log_prob.detach(),
            old_log_prob=batch["log_prob"],
            discount=self.cfg.discount,
            trace_decay=cfg.trace_decay,
            rho_clip=cfg.rho_clip,
            c_clip=cfg.c_clip,
            adv_rho_clip=cfg.rho_clip,
        )
        return follow_policy_gradient(
            self, self.actor_critic, distribution, log_prob, target.adv, value, target.value
        )
