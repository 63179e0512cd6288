"""Behaviour cloning."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Self, Unpack

import numpy as np
import torch
from torch import nn

from dmiddleware.config import Option, count, fraction, optional, positive
from dmiddleware.model.spaces import HasSpaces
from dmiddleware.policy.actions import ACTION_OPTIONS, ActionOptions, mask_of
from dmiddleware.policy.component import Component, adam
from dmiddleware.policy.options import COLLECT_OPTIONS, LEARNING_RATE
from dmiddleware.policy.policy import MODES, Mode, Policy, PolicyOptions
from dmiddleware.policy.policy_registry import POLICY_REGISTRY
from dmiddleware.rl import bc_hits, bc_loss
from dmiddleware.schedule import Schedule
from dmiddleware.tree import Nested, Value

__all__ = ["BCOptions", "BCPolicy"]


class BCOptions(ActionOptions, PolicyOptions, total=False):
    """The options of :meth:`BCPolicy.for_env`."""

    batch_size: int
    learning_rate: float | Schedule
    adam_eps: float
    label_smoothing: float
    grad_clip_norm: float | None
    n_sample: int | None
    n_episode: int | None


@POLICY_REGISTRY.register("bc")
class BCPolicy(Policy):
    """Behaviour cloning: supervised learning of an expert's actions (Pomerleau, "ALVINN", 1989).

    The loss is the cross-entropy for choices and bits. For continuous actions it is the mean
    squared error of the mean action, relative to the action bounds (see :class:`ActionCodec`), so
    all dimensions count equally. The losses of an action's parts are added up; ``accuracy`` is the
    share of rows in which all choices and bits are the expert's. Learns from the columns ``obs``
    and ``action``, and ``weight`` if
    there is one; needs no environment. Collecting acts greedily, like evaluating.
    """

    config: ClassVar[dict[str, Any]] = {
        **ACTION_OPTIONS,
        "learn": {
            "batch_size": Option(256, count, "rows per update"),
            "update_per_collect": Option(1, count, "updates after each collection", keyword=None),
            "learning_rate": Option(1e-3, LEARNING_RATE, "Adam's learning rate"),
            "adam_eps": Option(1e-8, positive, "Adam's ε"),
            "label_smoothing": Option(
                0.0, fraction, "weight of the uniform distribution in discrete targets"
            ),
            "grad_clip_norm": Option(
                None, optional(positive), "largest norm of the gradient; None does not clip"
            ),
        },
        "collect": COLLECT_OPTIONS,
    }
    learn_columns: ClassVar[tuple[str, ...]] = ("obs", "action")

    @classmethod
    def for_env(  # type: ignore[override]  # only the options of this algorithm
        cls,
        env: HasSpaces,
        *,
        model: nn.Module | Mapping[str, Any] | None = None,
        modes: Iterable[Mode] = MODES,
        **options: Unpack[BCOptions],
    ) -> Self:
        """Build the policy for an environment, as :meth:`Policy.for_env` describes.

        :doc:`/reference/configuration` lists the options.
        """
        return super().for_env(env, model=model, modes=modes, **options)

    def default_model(self) -> tuple[str, list[str]]:
        """Return the model to build where ``cfg.model`` names none."""
        return "actor", ["dmiddleware.model"]

    def make_components(self) -> dict[str, Component]:
        """Return the networks, and how each is trained."""
        learn = self.cfg.learn
        optimizer = adam(self.schedules["learn.learning_rate"], eps=learn.adam_eps)
        clip = learn.grad_clip_norm
        return {
            "actor": Component(self.model, optimizer, grad_clip_norm=clip, acts=True),
        }

    def update(self, batch: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """Make one update; see :meth:`Policy.update`."""
        learn = self.cfg.learn
        mask = mask_of(batch["obs"], batch.get("action_mask"))
        distribution = self.codec.distribution(self.actor_output(batch["obs"]), mask)
        raw = self.codec.to_raw(batch["action"])
        loss = bc_loss(
            distribution, raw, weight=batch.get("weight"), label_smoothing=learn.label_smoothing
        )
        answer: dict[str, torch.Tensor] = {}
        hits = bc_hits(distribution, raw)
        if hits is not None:
            answer["accuracy"] = hits.float().mean()
        norm = self.components["actor"].step(loss)
        answer["total_loss"] = loss.detach()
        if learn.grad_clip_norm is not None:
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
        return self.acted(obs, action_mask, None if deterministic else self.generator)
