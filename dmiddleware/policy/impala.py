"""IMPALA."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Self, Unpack

import torch
from easydict import EasyDict
from torch import nn

from dmiddleware.config import Option, check_value, count, fraction, positive
from dmiddleware.data import MinibatchUnit
from dmiddleware.errors import StructureError
from dmiddleware.model.spaces import HasSpaces
from dmiddleware.policy.actor_critic import (
    POLICY_GRADIENT_OPTIONS,
    ActorCriticPolicy,
    PolicyGradientOptions,
    follow_policy_gradient,
    policy_gradient_component,
)
from dmiddleware.policy.component import Component
from dmiddleware.policy.network_outputs import values_of_rows
from dmiddleware.policy.options import LEARNING_RATE
from dmiddleware.policy.policy import MODES, Mode
from dmiddleware.policy.policy_registry import POLICY_REGISTRY
from dmiddleware.rl import episode_cuts, vtrace
from dmiddleware.tree import Batch

__all__ = ["IMPALAOptions", "IMPALAPolicy"]


class IMPALAOptions(PolicyGradientOptions, total=False):
    """The options of :meth:`IMPALAPolicy.for_env`."""

    trace_decay: float
    rho_clip: float
    c_clip: float


@POLICY_REGISTRY.register("impala")
class IMPALAPolicy(ActorCriticPolicy):
    """IMPALA (Espeholt et al., "IMPALA: Scalable Distributed Deep-RL", 2018).

    Collectors act with weights that are some updates old. V-trace corrects the targets of the
    values (equation 1) and the advantages (section 4.2) by the ratio of the probabilities that the
    learning and the acting policy give to an action, so nobody has to wait for the newest weights.

    Differences from the paper: losses are averaged over the rows, where the paper adds them up; an
    episode that ends by a time limit bootstraps from its last observation; the default network is
    that of PPO.

    One learn forward is one update from whole lanes ``[T, B, …]``: the columns ``obs``, ``action``
    (``raw_action`` where there is one), ``log_prob`` of the policy that acted, ``reward``,
    ``next_obs``, ``terminated``, ``done``, and ``episode_id`` where there is one. It learns from
    collected trajectories as they are, so its chain has no estimator of advantages. All kinds of
    actions are supported; see :class:`ActionCodec`.
    """

    config: ClassVar[dict[str, Any]] = {
        "learn": {
            **POLICY_GRADIENT_OPTIONS,
            "batch_size": Option(640, count, "least rows per update, in whole lanes"),
            "learning_rate": Option(6e-4, LEARNING_RATE, "the optimizer's learning rate"),
            "trace_decay": Option(1.0, fraction, "λ of V-trace (remark 2)"),
            "rho_clip": Option(1.0, positive, "bound of the ratios ρ, also of the advantages'"),
            "c_clip": Option(1.0, positive, "bound of the ratios c, at most that of ρ"),
        },
    }
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

    @classmethod
    def for_env(  # type: ignore[override]  # only the options of this algorithm
        cls,
        env: HasSpaces,
        *,
        model: nn.Module | Mapping[str, Any] | None = None,
        modes: Iterable[Mode] = MODES,
        **options: Unpack[IMPALAOptions],
    ) -> Self:
        """Build the policy for an environment, as :meth:`Policy.for_env` describes.

        :doc:`/reference/configuration` lists the options.
        """
        return super().for_env(env, model=model, modes=modes, **options)

    @classmethod
    def check_config(cls, cfg: EasyDict) -> None:
        """Reject bounds in the wrong order."""
        super().check_config(cfg)
        learn = cfg.learn
        check_value(
            learn.c_clip <= learn.rho_clip,
            "learn.c_clip",
            learn.c_clip,
            f"at most learn.rho_clip, which is {learn.rho_clip}",
        )

    def check_batch(self, batch: Batch) -> Batch:
        """Refuse rows that are not lanes."""
        if batch["done"].dim() != 2:
            raise StructureError(
                "IMPALA learns from lanes [T, B, …], but the batch has rows "
                f"{tuple(batch['done'].shape)}; use OnPolicyLearner after a StepCollector"
            )
        return batch

    def make_components(self) -> dict[str, Component]:
        """Return the network."""
        return {"actor_critic": policy_gradient_component(self)}

    def update(self, batch: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """Make one update; see :meth:`Policy.update`."""
        learn = self.cfg.learn
        output = self.model(batch["obs"])
        distribution = self.learned_distribution(output, batch)
        log_prob = distribution.log_prob(self.raw_action(batch))
        with torch.no_grad():
            next_value = self.critic_output(batch["next_obs"], n_lead=2)
        value = values_of_rows(output["value"], log_prob.shape)
        target = vtrace(
            batch["reward"],
            value.detach(),
            next_value,
            batch["terminated"],
            episode_cuts(batch),
            log_prob=log_prob.detach(),
            old_log_prob=batch["log_prob"],
            discount=self.cfg.discount_factor,
            trace_decay=learn.trace_decay,
            rho_clip=learn.rho_clip,
            c_clip=learn.c_clip,
            adv_rho_clip=learn.rho_clip,
        )
        return follow_policy_gradient(self, distribution, log_prob, target.adv, value, target.value)
