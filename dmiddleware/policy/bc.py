"""Behaviour cloning."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Self, Unpack

import numpy as np
import torch
from torch import nn

from dmiddleware.config import Option, count, fraction, optional, positive
from dmiddleware.data.batch import Nested, Value
from dmiddleware.model.spaces import HasSpaces
from dmiddleware.policy.base.actions import ActorOptions, ActorPolicy
from dmiddleware.policy.base.command import CommandModePolicy
from dmiddleware.policy.base.common_options import COLLECT_OPTIONS, LEARNING_RATE
from dmiddleware.policy.base.parts import Part, adam
from dmiddleware.policy.policy_registry import POLICY_REGISTRY
from dmiddleware.rl import bc_hits, bc_loss
from dmiddleware.schedule import Schedule

__all__ = ["BCOptions", "BCPolicy"]


class BCOptions(ActorOptions, total=False):
    """The options of :meth:`BCPolicy.for_env`."""

    batch_size: int
    learning_rate: float | Schedule
    adam_eps: float
    label_smoothing: float
    grad_clip_norm: float | None
    n_sample: int | None
    n_episode: int | None


@POLICY_REGISTRY.register("bc_command")
@POLICY_REGISTRY.register("bc")
class BCPolicy(ActorPolicy, CommandModePolicy):
    """Behaviour cloning: supervised learning of an expert's actions (Pomerleau, "ALVINN", 1989).

    The loss is the cross-entropy for choices and bits. For continuous actions it is the mean
    squared error of the mean action, relative to the action bounds (see :class:`ActorPolicy`), so
    all dimensions count equally. The losses of an action's parts are added up; ``accuracy`` is the
    share of rows in which all choices and bits are the expert's. Learns from the columns ``obs``
    and ``action``, and ``weight`` if
    there is one; needs no environment. Collecting acts greedily, like evaluating.
    """

    config: ClassVar[dict[str, Any]] = {
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
        enable_field: Iterable[str] | None = None,
        **options: Unpack[BCOptions],
    ) -> Self:
        """Build the policy for an environment, as :meth:`Policy.for_env` describes.

        :doc:`/reference/configuration` lists the options.
        """
        return super().for_env(env, model=model, enable_field=enable_field, **options)

    def default_model(self) -> tuple[str, list[str]]:
        """Return the model to build where ``cfg.model`` names none."""
        return "actor", ["dmiddleware.model"]

    def _make_parts(self) -> dict[str, Part]:
        learn = self._cfg.learn
        optimizer = adam(self._schedules["learn.learning_rate"], eps=learn.adam_eps)
        clip = learn.grad_clip_norm
        return {
            **super()._make_parts(),
            "actor": Part(self._model, optimizer, grad_clip_norm=clip, acts=True),
        }

    def _update(self, batch: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        learn = self._cfg.learn
        mask = self._mask_of(batch["obs"], batch.get("action_mask"))
        distribution = self._codec.distribution(self._actor_output(batch["obs"]), mask)
        raw = self._codec.to_raw(batch["action"])
        loss = bc_loss(
            distribution, raw, weight=batch.get("weight"), label_smoothing=learn.label_smoothing
        )
        answer: dict[str, torch.Tensor] = {}
        hits = bc_hits(distribution, raw)
        if hits is not None:
            answer["accuracy"] = hits.float().mean()
        norm = self._parts["actor"].step(loss)
        answer["total_loss"] = loss.detach()
        if learn.grad_clip_norm is not None:
            answer["grad_norm"] = norm
        return answer

    def _forward_collect_batch(
        self,
        obs: Value,
        env_id: np.ndarray,
        *,
        deterministic: bool = True,
        action_mask: Nested | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        return self._acted(obs, action_mask, None if deterministic else self._generator)
