"""Policies with an explicit actor: greedy actions, and the bounds of continuous actions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import gymnasium as gym
import numpy as np
import torch

from dmiddleware.config import Option, Range, one_of, optional
from dmiddleware.data.batch import Value
from dmiddleware.errors import ConfigError, SpaceError
from dmiddleware.model import action_kind_of
from dmiddleware.policy.base.parts import Part
from dmiddleware.policy.base.parts_policy import PartsOptions, PartsPolicy

__all__ = ["ActionBounds", "ActorPolicy"]

_BOUND = Range(
    "a list of numbers", lambda value: not isinstance(value, str) and isinstance(value, Sequence)
)


class ActionBounds:
    """The bounds of an environment's Box of actions, and the mapping to and from them.

    The raw action is the draw from a Gaussian, which is unbounded; log-probabilities refer to it.
    The env action is what the environment receives:

    - ``mode="rescale"``: raw ``[-1, 1]`` is mapped to ``[low, high]``, and clipped. A new network,
      whose outputs are about 0 with a deviation of 1, then explores the whole Box. Dimensions
      without finite bounds are not changed.
    - ``mode="clip"``: the raw action is clipped to ``[low, high]``.

    Args:
        low: ``[A]`` lower bounds; None (with ``high`` None): unknown, actions pass unchanged.
        high: ``[A]`` upper bounds.
        mode: ``"rescale"`` or ``"clip"``.

    Raises:
        ConfigError: if only one bound is given, lengths differ, or a lower bound is not below its
            upper bound.
    """

    def __init__(
        self,
        low: Sequence[float] | None = None,
        high: Sequence[float] | None = None,
        *,
        mode: str = "rescale",
    ) -> None:
        self._mode = mode
        self._unbounded = False
        self._low: torch.Tensor | None = None
        self._high: torch.Tensor | None = None
        if (low is None) != (high is None):
            raise ConfigError(
                f"action_low and action_high belong together, got {low!r} and {high!r}; "
                "give both, or neither"
            )
        if low is not None and high is not None:
            self._set(torch.as_tensor(low), torch.as_tensor(high))

    def to_env(self, raw: torch.Tensor) -> torch.Tensor:
        """Return the env actions ``[…, A]`` of raw actions, which are on the CPU."""
        if self._low is None:
            self._unbounded = True
            return raw
        if self._mode == "rescale":
            raw = self._center + raw * self._half
        return raw.clamp(self._low, self._high)

    def to_raw(self, action: torch.Tensor) -> torch.Tensor:
        """Return raw actions that :meth:`to_env` maps to these env actions."""
        if self._low is None:
            self._unbounded = True
        if self._low is None or self._mode == "clip":
            return action
        device = action.device
        return (action - self._center.to(device)) / self._half.to(device)

    def check(self, space: gym.Space[Any]) -> None:
        """Reject a space with different bounds.

        Raises:
            SpaceError: with both bounds.
        """
        if not isinstance(space, gym.spaces.Box):
            raise SpaceError(
                f"the policy's actions are continuous, but the environment takes {space}"
            )
        if self._low is None or self._high is None:
            return
        low, high = _bounds_of(space)
        if not (torch.equal(low, self._low) and torch.equal(high, self._high)):
            raise SpaceError(
                f"the policy gives actions from {self._low.tolist()} to {self._high.tolist()}, the "
                f"environment takes {low.tolist()} to {high.tolist()}; set action_low and "
                "action_high to the environment's bounds"
            )

    def adopt(self, space: gym.spaces.Box) -> None:
        """Take a space's bounds, unless there are bounds or actions were used without them."""
        if self._low is None and not self._unbounded:
            self._set(*_bounds_of(space))

    def state_dict(self) -> dict[str, Any]:
        """Return the bounds, or whether actions were used without bounds."""
        if self._low is None or self._high is None:
            return {"unbounded": self._unbounded}
        return {"low": self._low.clone(), "high": self._high.clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the bounds; a state without bounds leaves the present ones."""
        if "low" in state:
            self._set(state["low"], state["high"])
        self._unbounded = bool(state.get("unbounded", False))

    def _set(self, low: torch.Tensor, high: torch.Tensor) -> None:
        low, high = low.to("cpu", torch.float32), high.to("cpu", torch.float32)
        if low.shape != high.shape or low.dim() != 1 or not bool((low < high).all()):
            raise ConfigError(
                "action_low and action_high must be as long as the action, each lower bound below "
                f"its upper one, got {low.tolist()} and {high.tolist()}"
            )
        self._low, self._high = low, high
        bounded = low.isfinite() & high.isfinite()
        self._half = torch.where(bounded, high / 2 - low / 2, 1.0)
        self._center = torch.where(bounded, high / 2 + low / 2, 0.0)


class ActorOptions(PartsOptions, total=False):
    """The options that all actor policies have in ``for_env``."""

    action_low: Sequence[float] | None
    action_high: Sequence[float] | None
    action_bounding: Literal["rescale", "clip"]


class ActorPolicy(PartsPolicy):
    """A policy whose model returns a distribution over actions: ``logit``, or ``mu`` and ``sigma``.

    The bounds of continuous actions come from ``action_low`` and ``action_high``; where these are
    None, they are taken from the first environment that the policy is checked against, by
    :meth:`for_env` or a collector, unless actions were used without bounds before. Without bounds,
    actions are not clipped.
    See :class:`ActionBounds` for ``action_bounding``.
    """

    config: ClassVar[dict[str, Any]] = {
        "action_low": Option(
            None,
            optional(_BOUND),
            "lower bounds of continuous actions; None uses the environment's",
        ),
        "action_high": Option(
            None,
            optional(_BOUND),
            "upper bounds of continuous actions; None uses the environment's",
        ),
        "action_bounding": Option(
            "rescale",
            one_of("rescale", "clip"),
            "how to keep actions within the bounds: by mapping [-1, 1] to them, or by clipping",
        ),
    }

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

    def _make_parts(self) -> dict[str, Part]:
        return {"action_bounds": Part(self._bounds, acts=True)}

    def _normalised(self, obs: Value) -> Value:
        """Return observations as the model sees them."""
        return obs

    def _distribution(self, obs: Value) -> dict[str, torch.Tensor]:
        """Return the model's distribution over actions, without running the critic if possible."""
        actor = getattr(self._model, "compute_actor", self._model)
        output: dict[str, torch.Tensor] = actor(self._normalised(obs))
        return output

    def _forward_eval_batch(self, obs: Value, env_id: np.ndarray, **kwargs: Any) -> dict[str, Any]:
        output = self._distribution(obs)
        if "logit" in output:
            return {"action": output["logit"].argmax(-1)}
        return {"action": self._bounds.to_env(output["mu"].cpu())}

    def _check_spaces(
        self, observation_space: gym.Space[Any], action_space: gym.Space[Any]
    ) -> None:
        super()._check_spaces(observation_space, action_space)
        if isinstance(action_space, gym.spaces.Discrete):
            return
        if isinstance(action_space, gym.spaces.Box):
            self._bounds.adopt(action_space)
        self._bounds.check(action_space)


def _bounds_of(space: gym.spaces.Box) -> tuple[torch.Tensor, torch.Tensor]:
    return (
        torch.as_tensor(space.low.copy(), dtype=torch.float32),
        torch.as_tensor(space.high.copy(), dtype=torch.float32),
    )
