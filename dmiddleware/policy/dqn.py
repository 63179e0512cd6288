"""Deep Q-learning."""

from __future__ import annotations

import copy
from typing import Any, ClassVar

import numpy as np
import torch

from dmiddleware.policy.command import CommandModePolicy
from dmiddleware.policy.registry import POLICY_REGISTRY
from dmiddleware.rl import epsilon_greedy, q_target, td_loss

__all__ = ["DQNPolicy"]


@POLICY_REGISTRY.register("dqn")
class DQNPolicy(CommandModePolicy):
    """Deep Q-learning (Mnih et al., "Human-level control through deep RL", Nature 2015).

    With the parts that became standard, each of which a key of the config turns on or off: the
    double target (van Hasselt et al., 2016), the dueling network (Wang et al., 2016; a key of
    ``model``), n-step returns and prioritized replay (a matter of the buffer: this policy uses the
    columns ``discount`` and ``weight`` where a batch has them, and returns ``priority``).

    Learns from the columns ``obs``, ``action``, ``reward``, ``next_obs``, ``terminated``, and, if
    they are there, ``discount`` (what to multiply the bootstrap with) and ``weight``.
    """

    config: ClassVar[dict[str, Any]] = {
        "priority": False,
        "discount_factor": 0.99,
        "learn": {
            "batch_size": 64,
            "learning_rate": 1e-3,
            "adam_eps": 1e-8,
            "double": True,
            "loss": "huber",
            "target_update_freq": 500,
            "target_tau": 1.0,
            "grad_clip_norm": None,
        },
        "collect": {"n_sample": None, "n_episode": None},
        "other": {"eps": {"type": "linear", "start": 1.0, "end": 0.05, "decay": 10_000}},
    }

    def default_model(self) -> tuple[str, list[str]]:
        """Return the model that is built by default."""
        return "q_network", ["dmiddleware.model"]

    def _init_learn(self) -> None:
        learn = self._cfg.learn
        self._target = copy.deepcopy(self._model).requires_grad_(False)
        self._target.train()
        parameters = [p for p in self._model.parameters() if p.requires_grad]
        self._optimizer = torch.optim.Adam(
            parameters, lr=learn.learning_rate, eps=learn.adam_eps, fused=True
        )
        self._train_iter = 0

    def _forward_learn(self, batch: Any, **kwargs: Any) -> dict[str, Any]:
        obs, next_obs = batch["obs"], batch["next_obs"]
        learn = self._cfg.learn
        weight = batch.get("weight", None)
        discount = batch.get("discount", self._cfg.discount_factor)
        with torch.no_grad():
            target = q_target(
                self._target(next_obs)["logit"],
                batch["reward"],
                batch["terminated"],
                discount=discount,
                next_q_online=self._model(next_obs)["logit"] if learn.double else None,
            )
        q = self._model(obs)["logit"]
        loss, td_error = td_loss(q, batch["action"], target, weight=weight, criterion=learn.loss)
        total_loss = loss.item()
        self._check_finite(total_loss, batch)
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        self.sync_gradients(self._model)
        self._optimizer.step()
        self._train_iter += 1
        if self._train_iter % learn.target_update_freq == 0:
            self._update_target(learn.target_tau)
        output = {"cur_lr": learn.learning_rate, "total_loss": total_loss}
        if weight is not None or self._cfg.priority:
            output["priority"] = td_error.abs()
        return output

    def _update_target(self, tau: float) -> None:
        with torch.no_grad():
            torch._foreach_lerp_(
                list(self._target.parameters()), list(self._model.parameters()), tau
            )

    def _forward_collect_batch(
        self, obs: Any, env_id: np.ndarray, *, eps: float = 0.0, **kwargs: Any
    ) -> dict[str, Any]:
        logit = self._model(obs)["logit"].cpu()
        return {"action": epsilon_greedy(logit, eps, generator=self._generator), "logit": logit}

    def _forward_eval_batch(self, obs: Any, env_id: np.ndarray, **kwargs: Any) -> dict[str, Any]:
        return {"action": self._model(obs)["logit"].argmax(-1)}
