"""What policies with an explicit actor share: greedy actions and the bounds of actions."""

from __future__ import annotations

from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
import torch
from easydict import EasyDict

from dmiddleware.model import action_kind_of
from dmiddleware.policy.base import state_dict as state
from dmiddleware.policy.base.config_checks import check_choice
from dmiddleware.policy.base.policy import Policy
from dmiddleware.policy.bounds import ActionBounds

__all__ = ["ActorPolicy"]


class ActorPolicy(Policy):
    """A policy whose model gives a distribution over actions: ``logit``, or ``mu`` and ``sigma``.

    The bounds of continuous actions come from ``action_low`` and ``action_high``; where these are
    None, a policy that has not learned yet takes them from the first environment that it is checked
    against (:meth:`from_spaces` and collectors do that). Without bounds, actions are not clipped.
    See :class:`~dmiddleware.policy.bounds.ActionBounds` for ``action_bounding``.
    """

    config: ClassVar[dict[str, Any]] = {
        "action_low": None,
        "action_high": None,
        "action_bounding": "rescale",
    }

    @classmethod
    def check_config(cls, cfg: EasyDict) -> None:
        """Refuse impossible values."""
        super().check_config(cfg)
        check_choice("action_bounding", cfg.action_bounding, ("rescale", "clip"))

    @classmethod
    def _model_options_of(
        cls, observation_space: gym.Space[Any], action_space: gym.Space[Any]
    ) -> dict[str, Any]:
        return {
            **super()._model_options_of(observation_space, action_space),
            "action_space": action_kind_of(action_space),
        }

    def _init_common(self) -> None:
        cfg = self._cfg
        self._bounds = ActionBounds(cfg.action_low, cfg.action_high, mode=cfg.action_bounding)

    def _normalised(self, obs: Any) -> Any:
        """Return what the model is to see of observations."""
        return obs

    def _distribution(self, obs: Any) -> dict[str, torch.Tensor]:
        """Return what the model says of actions, without the critic's work if that is possible."""
        actor = getattr(self._model, "compute_actor", self._model)
        output: dict[str, torch.Tensor] = actor(self._normalised(obs))
        return output

    def _forward_eval_batch(self, obs: Any, env_id: np.ndarray, **kwargs: Any) -> dict[str, Any]:
        output = self._distribution(obs)
        if "logit" in output:
            return {"action": output["logit"].argmax(-1)}
        return {"action": self._bounds.to_env(output["mu"].cpu())}

    def _check_spaces(self, observation_space: gym.Space[Any], action_space: Any) -> None:
        super()._check_spaces(observation_space, action_space)
        if isinstance(action_space, gym.spaces.Discrete):
            return
        if not self._bounds.known and self._train_iter == 0:
            self._bounds.adopt(action_space)
        self._bounds.check(action_space)

    def _state_dict_collect(self) -> dict[str, Any]:
        return {**super()._state_dict_collect(), "action_bounds": self._bounds.state_dict()}

    def _load_state_dict_collect(self, state_dict: dict[str, Any]) -> None:
        bounds = state.part_of(state_dict, "action_bounds")
        super()._load_state_dict_collect(state_dict)
        self._bounds.load_state_dict(bounds)
