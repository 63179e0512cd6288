"""Deep Q-learning."""

from __future__ import annotations

import copy
from typing import Any, ClassVar

import numpy as np
import torch
from easydict import EasyDict
from torch import nn

from dmiddleware.errors import ConfigError
from dmiddleware.policy.base.batched_policy import BatchedPolicy
from dmiddleware.policy.base.command import CommandModePolicy
from dmiddleware.policy.base.config_checks import (
    check_choice,
    check_count,
    check_fraction,
    check_positive,
)
from dmiddleware.policy.base.state_dict import (
    check_model_state,
    load_model_state,
    model_state,
    part_of,
)
from dmiddleware.policy.registry import POLICY_REGISTRY
from dmiddleware.rl import EpsilonSchedule, epsilon_greedy, q_target, td_loss
from dmiddleware.rl.optim import FusedAdam

__all__ = ["DQNPolicy"]


@POLICY_REGISTRY.register("dqn")
class DQNPolicy(BatchedPolicy, CommandModePolicy):
    """Deep Q-learning (Mnih et al., "Human-level control through deep RL", Nature 2015).

    With the parts that became standard:

    - the double target of van Hasselt et al., "Deep RL with Double Q-learning" (2016):
      ``learn.double``;
    - the dueling network of Wang et al. (2016): ``model.dueling``;
    - n-step targets (Sutton and Barto, 2nd edition, chapter 7): a batch's column ``discount`` is
      what its bootstraps are multiplied with, in place of ``discount_factor``; the buffer makes it;
    - prioritized replay (Schaul et al., 2016): a batch's column ``weight`` weights its errors, and
      the answer has ``priority``, the absolute TD errors (also with ``priority=True``);
    - a target network that follows in jumps (Mnih: ``target_update_freq`` updates apart,
      ``target_tau=1``) or slowly (Lillicrap et al., "Continuous control with deep RL", 2016:
      ``target_update_freq=1, target_tau=0.005``): every ``target_update_freq`` updates it goes the
      fraction ``target_tau`` of the way to the online network.

    Learns from the columns ``obs``, ``action`` int64, ``reward``, ``next_obs``, ``terminated``.
    Collecting takes the keyword ``eps``, the probability of a random action, and gives ``action``
    and ``logit``, the actions' values. As commander it gives the ``eps`` that ``other.eps`` has for
    the environment steps so far.

    Example:
        >>> policy = DQNPolicy({"model": {"obs_shape": 4, "action_shape": 2}})
        >>> policy.collect_mode.forward(torch.zeros(8, 4), eps=0.1)["action"].shape
        torch.Size([8])
    """

    config: ClassVar[dict[str, Any]] = {
        "priority": False,
        "discount_factor": 0.99,
        "nstep": 1,
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
    learn_columns: ClassVar[tuple[str, ...]] = (
        "obs",
        "action",
        "reward",
        "next_obs",
        "terminated",
    )

    @classmethod
    def check_config(cls, cfg: EasyDict) -> None:
        """Refuse impossible values."""
        super().check_config(cfg)
        learn = cfg.learn
        check_fraction("discount_factor", cfg.discount_factor)
        check_count("nstep", cfg.nstep)
        check_count("learn.batch_size", learn.batch_size)
        check_positive("learn.learning_rate", learn.learning_rate)
        check_positive("learn.adam_eps", learn.adam_eps)
        check_choice("learn.loss", learn.loss, ("huber", "mse"))
        check_count("learn.target_update_freq", learn.target_update_freq)
        check_fraction("learn.target_tau", learn.target_tau)
        check_positive("learn.target_tau", learn.target_tau)
        check_positive("learn.grad_clip_norm", learn.grad_clip_norm, optional=True)
        check_count("collect.n_sample", cfg.collect.n_sample, optional=True)
        check_count("collect.n_episode", cfg.collect.n_episode, optional=True)
        check_choice("other.eps.type", cfg.other.eps.type, ("linear", "exponential"))
        _eps_schedule(cfg)

    def default_model(self) -> tuple[str, list[str]]:
        """Return the model that is built where ``cfg.model`` names none."""
        return "q_network", ["dmiddleware.model"]

    def _init_learn(self) -> None:
        learn = self._cfg.learn
        self._target: nn.Module = copy.deepcopy(self._model).requires_grad_(False).eval()
        self._online_parameters: list[torch.Tensor] = list(self._model.parameters())
        self._target_parameters: list[torch.Tensor] = list(self._target.parameters())
        self._optimizer = FusedAdam(
            (p for p in self._online_parameters if p.requires_grad),
            lr=learn.learning_rate,
            eps=learn.adam_eps,
        )

    def _init_command(self) -> None:
        self._eps = _eps_schedule(self._cfg)

    def _forward_learn(self, batch: Any, **kwargs: Any) -> dict[str, Any]:
        learn = self._cfg.learn
        weight = batch.get("weight", None)
        target = self._td_target(batch)
        q = self._model(batch["obs"])["logit"]
        loss, td_error = td_loss(q, batch["action"], target, weight=weight, criterion=learn.loss)
        total_loss, mean_target, mean_error = self._scalars(loss, target.mean(), td_error.mean())
        self._check_finite(total_loss, batch)
        output: dict[str, Any] = self._descend(loss, batch, clip_norm=learn.grad_clip_norm)
        output["total_loss"] = total_loss
        output["q_value"] = mean_target - mean_error
        output["target_q_value"] = mean_target
        if self._train_iter % learn.target_update_freq == 0:
            self._update_target()
        if weight is not None or self._cfg.priority:
            output["priority"] = td_error.abs()
        return output

    def _monitor_vars_learn(self) -> list[str]:
        return ["cur_lr", "total_loss", "q_value", "target_q_value"]

    @torch.no_grad()
    def _td_target(self, batch: Any) -> torch.Tensor:
        next_obs = batch["next_obs"]
        next_q_online = None
        if self._cfg.learn.double:
            with self._evaluating():
                next_q_online = self._model(next_obs)["logit"]
        return q_target(
            self._target(next_obs)["logit"],
            batch["reward"],
            batch["terminated"],
            discount=batch.get("discount", self._cfg.discount_factor),
            next_q_online=next_q_online,
        )

    def _update_target(self) -> None:
        tau = self._cfg.learn.target_tau
        with torch.no_grad():
            torch._foreach_lerp_(self._target_parameters, self._online_parameters, tau)
            for own, online in zip(self._target.buffers(), self._model.buffers(), strict=True):
                own.copy_(online)

    def _forward_collect_batch(
        self, obs: Any, env_id: np.ndarray, *, eps: float = 0.0, **kwargs: Any
    ) -> dict[str, Any]:
        # Exploring happens on the CPU, so that a run draws the same numbers with and without a GPU.
        logit = self._model(obs)["logit"]
        if self._on_gpu:
            logit = logit.cpu()
        return {"action": epsilon_greedy(logit, eps, generator=self._generator), "logit": logit}

    def _forward_eval_batch(self, obs: Any, env_id: np.ndarray, **kwargs: Any) -> dict[str, Any]:
        return {"action": self._model(obs)["logit"].argmax(-1)}

    def _get_setting_collect(self, command_info: dict[str, Any]) -> dict[str, Any]:
        return {"eps": self._eps(command_info["envstep"])}

    def _after_loading_weights(self) -> None:
        self._target.load_state_dict(self._model.state_dict())

    def _state_dict_learn(self) -> dict[str, Any]:
        return {**super()._state_dict_learn(), "target": model_state(self._target)}

    def _load_state_dict_learn(self, state_dict: dict[str, Any]) -> None:
        target = part_of(state_dict, "target")
        check_model_state(self._target, target, "target network")
        super()._load_state_dict_learn(state_dict)
        load_model_state(self._target, target, "target network")


def _eps_schedule(cfg: EasyDict) -> EpsilonSchedule:
    eps = cfg.other.eps
    try:
        return EpsilonSchedule(eps.start, eps.end, eps.decay, eps.type)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"other.eps is no schedule: {error}") from error
