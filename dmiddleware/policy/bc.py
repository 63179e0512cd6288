"""Behavior cloning."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

import numpy as np
import torch
from torch import nn

from dmiddleware.policy.action_codec import ActorSettings, mask_of
from dmiddleware.policy.component import Component, adam
from dmiddleware.policy.obs_groups import ActorGroup, made_from_names
from dmiddleware.policy.obs_norm import DatasetNormSettings
from dmiddleware.policy.policy import Policy
from dmiddleware.policy.policy_registry import POLICY_REGISTRY
from dmiddleware.rl import bc_hits, bc_loss
from dmiddleware.schedule import LearningRate
from dmiddleware.settings import Fraction, Positive
from dmiddleware.tree import Columns, Nested, Value

__all__ = ["BCPolicy", "BCSettings"]


class BCSettings(DatasetNormSettings, ActorSettings):
    """The settings of behavioral cloning."""

    batch_size = 256
    obs_norm = False
    learning_rate: LearningRate = 1e-3
    """Adam's learning rate."""
    adam_eps: Positive = 1e-8
    """Adam's ε."""
    label_smoothing: Fraction = 0.0
    """Weight of the uniform distribution in discrete targets."""
    grad_clip_norm: Positive | None = None
    """Largest norm of the gradient; None does not clip."""
    obs_groups: Annotated[ActorGroup, made_from_names(ActorGroup)] = ActorGroup()
    """The parts of Dict observations that the actor sees."""


@POLICY_REGISTRY.register("bc")
class BCPolicy(Policy):
    """Behavior cloning: supervised learning of an expert's actions (Pomerleau, "ALVINN", 1989).

    The loss is the cross-entropy for choices and bits. For continuous actions it is the mean
    squared error of the mean action, relative to the action bounds (see :class:`ActionCodec`), so
    all dimensions count equally. The losses of an action's parts are added up; ``accuracy`` is the
    share of rows in which all choices and bits are the expert's. Learns from the columns ``obs``
    and ``action``, and ``weight`` if
    there is one; needs no environment. With ``obs_norm``, observations have mean 0 and standard
    deviation 1 over the data set: call :meth:`observe` with them before learning. Collecting acts
    greedily, like evaluating.
    """

    cfg: BCSettings
    actor: Component[nn.Module]
    reports: ClassVar[tuple[str, ...]] = (
        "total_loss",
        "accuracy",
        "grad_norm",
        "cur_lr",
    )
    model_type: ClassVar[str] = "actor"

    learn_columns: ClassVar[tuple[str, ...]] = ("obs", "action")

    def make_components(self) -> dict[str, Component[Any]]:
        """Return the networks, and how each is trained."""
        cfg = self.cfg
        optimizer = adam(cfg.learning_rate, eps=cfg.adam_eps)
        clip = cfg.grad_clip_norm
        return {
            "actor": Component(self.model, optimizer, grad_clip_norm=clip, acts=True),
        }

    def update(self, batch: Columns) -> dict[str, torch.Tensor]:
        """Make one update; see :meth:`Policy.update`."""
        cfg = self.cfg
        mask = mask_of(batch["obs"], batch.get("action_mask"))
        distribution = self.codec.distribution(self.actor_output(batch["obs"]), mask)
        raw = self.codec.to_raw(batch["action"])
        loss = bc_loss(
            distribution, raw, weight=batch.get("weight"), label_smoothing=cfg.label_smoothing
        )
        answer: dict[str, torch.Tensor] = {}
        hits = bc_hits(distribution, raw)
        if hits is not None:
            answer["accuracy"] = hits.float().mean()
        norm = self.actor.step(loss)
        answer["total_loss"] = loss.detach()
        if cfg.grad_clip_norm is not None:
            answer["grad_norm"] = norm
        return answer

    def act_collect(  # type: ignore[override]  # takes no other keywords
        self,
        obs: Value,
        env_id: np.ndarray,
        *,
        deterministic: bool = True,
        action_mask: Nested | None = None,
    ) -> dict[str, Any]:
        """Act as in evaluation; see :meth:`Policy.act_eval`."""
        generator = None if deterministic else self.generator
        return self.acted(self.actor_output(obs), obs, action_mask, generator)
