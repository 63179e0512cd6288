"""Behaviour cloning."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
from easydict import EasyDict

from dmiddleware.policy.base.actions import ActorPolicy
from dmiddleware.policy.base.config_checks import check_count, check_fraction, check_positive
from dmiddleware.policy.registry import POLICY_REGISTRY
from dmiddleware.rl import bc_continuous_loss, bc_discrete_loss
from dmiddleware.rl.optim import FusedAdam

__all__ = ["BCPolicy"]


@POLICY_REGISTRY.register("bc")
class BCPolicy(ActorPolicy):
    """Behaviour cloning: supervised learning of an expert's actions (Pomerleau, "ALVINN", 1989).

    Discrete actions by cross-entropy, continuous ones by the mean squared error of the mean action,
    measured between the action bounds (see :class:`ActorPolicy`) so that all dimensions count
    alike. Learns from the columns ``obs`` and ``action``, and ``weight`` where there is one; needs
    no environment. Collecting acts as evaluating does, greedily.
    """

    config: ClassVar[dict[str, Any]] = {
        "learn": {
            "batch_size": 256,
            "learning_rate": 1e-3,
            "adam_eps": 1e-8,
            "label_smoothing": 0.0,
            "grad_clip_norm": None,
        },
        "collect": {"n_sample": None, "n_episode": None},
    }
    learn_columns: ClassVar[tuple[str, ...]] = ("obs", "action")

    @classmethod
    def check_config(cls, cfg: EasyDict) -> None:
        """Refuse impossible values."""
        super().check_config(cfg)
        learn = cfg.learn
        check_count("learn.batch_size", learn.batch_size)
        check_positive("learn.learning_rate", learn.learning_rate)
        check_positive("learn.adam_eps", learn.adam_eps)
        check_fraction("learn.label_smoothing", learn.label_smoothing)
        check_positive("learn.grad_clip_norm", learn.grad_clip_norm, optional=True)
        check_count("collect.n_sample", cfg.collect.n_sample, optional=True)
        check_count("collect.n_episode", cfg.collect.n_episode, optional=True)

    def default_model(self) -> tuple[str, list[str]]:
        """Return the model that is built where ``cfg.model`` names none."""
        return "actor", ["dmiddleware.model"]

    def _init_learn(self) -> None:
        learn = self._cfg.learn
        self._optimizer = FusedAdam(
            (p for p in self._model.parameters() if p.requires_grad),
            lr=learn.learning_rate,
            eps=learn.adam_eps,
        )

    def _forward_learn(self, batch: Any, **kwargs: Any) -> dict[str, Any]:
        learn = self._cfg.learn
        output = self._distribution(batch["obs"])
        weight, action = batch.get("weight", None), batch["action"]
        answer: dict[str, Any] = {}
        if "logit" in output:
            smoothing = learn.label_smoothing
            loss = bc_discrete_loss(
                output["logit"], action, weight=weight, label_smoothing=smoothing
            )
            hits = (output["logit"].argmax(-1) == action).float().mean()
            answer["total_loss"], answer["accuracy"] = self._scalars(loss, hits)
        else:
            loss = bc_continuous_loss(output["mu"], self._bounds.to_raw(action), weight=weight)
            (answer["total_loss"],) = self._scalars(loss)
        self._check_finite(answer["total_loss"], batch)
        return {**answer, **self._descend(loss, batch, clip_norm=learn.grad_clip_norm)}

    def _forward_collect_batch(self, obs: Any, env_id: np.ndarray, **kwargs: Any) -> dict[str, Any]:
        return self._forward_eval_batch(obs, env_id)
