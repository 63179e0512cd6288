"""Policies whose actions go through an action codec, and those with an explicit actor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
import torch

from dmiddleware.config import Option, Range, one_of, optional
from dmiddleware.data.batch import Batch, Nested, Value
from dmiddleware.errors import SpaceError
from dmiddleware.model import action_kind_of
from dmiddleware.model.action_mask import action_mask_of, as_mask
from dmiddleware.policy.base.action_codec import ActionBounding, ActionCodec
from dmiddleware.policy.base.parts import Part
from dmiddleware.policy.base.parts_policy import PartsOptions, PartsPolicy
from dmiddleware.rl import Distribution

__all__ = ["ActorOptions", "ActorPolicy", "CodecPolicy", "only_bounding"]

_BOUND = Range(
    "a list of numbers", lambda value: not isinstance(value, str) and isinstance(value, Sequence)
)


class CodecPolicy(PartsPolicy):
    """A policy with an :class:`ActionCodec` (``self._codec``) between its model and its actions.

    The codec takes its details (the start of a Discrete space, the bounds of a Box) from the first
    environment that the policy is checked against, by :meth:`for_env` or a collector, and is saved
    with what acting needs.
    """

    act_inputs: ClassVar[tuple[str, ...]] = ("action_mask",)
    action_kinds: ClassVar[tuple[str, ...]] = ()
    """The kinds of actions that the algorithm supports; empty: all."""

    def _init_common(self) -> None:
        super()._init_common()
        self._codec = self._make_codec()

    def _check_columns(self, columns: Batch | Mapping[str, Any]) -> None:
        super()._check_columns(columns)
        # Rows that a collector made have actions of an env; those of other data may be anything.
        if "collect_iter" not in columns and "action" in columns:
            self._codec.check(columns["action"], mask=columns.get("mask"))

    def _make_codec(self) -> ActionCodec:
        return ActionCodec(self._model_action())

    def _model_action(self) -> Any:
        """Return the parts of the action that the model declares; empty if it declares none."""
        # A policy with only the command mode has no model.
        return getattr(getattr(self, "_model", None), "action_parts", ())

    def _make_parts(self) -> dict[str, Part]:
        return {"action_codec": Part(self._codec, acts=True, optional=True)}

    def _mask_of(self, obs: Nested, given: Nested | None) -> torch.Tensor | None:
        """Return what is allowed, ``[…, A]`` bool: a given mask, or the one in observations."""
        if given is not None:
            return as_mask(given)
        return None if type(obs) is torch.Tensor else action_mask_of(obs)

    def _acting_distribution(
        self, output: dict[str, torch.Tensor], obs: Nested, action_mask: Nested | None
    ) -> Distribution:
        """Return the distribution to act from; it and the outputs are moved to the CPU.

        Actions are drawn on the CPU, so a run draws the same numbers with and without a GPU.
        """
        mask = self._mask_of(obs, action_mask)
        if self._on_gpu:
            for name, column in output.items():
                output[name] = column.cpu()
            mask = None if mask is None else mask.cpu()
        return self._codec.distribution(output, mask)

    def _chosen_action(
        self, distribution: Distribution, generator: torch.Generator | None
    ) -> dict[str, Any]:
        """Return ``{"action"}``, the most likely ones, or draws from a generator."""
        raw = distribution.mode() if generator is None else distribution.sample(generator)
        return {"action": self._codec.to_env(raw)}

    def _raw_action(self, batch: Mapping[str, Any]) -> Any:
        """Return the raw actions of a batch: those that were stored, or from the env's actions."""
        if "raw_action" in batch:
            return batch["raw_action"]
        return self._codec.to_raw(batch["action"])

    def _allows(self, mask: torch.Tensor, action: Any) -> torch.Tensor:
        return self._codec.allows(mask, action)

    def _check_spaces(
        self, observation_space: gym.Space[Any], action_space: gym.Space[Any]
    ) -> None:
        if self._model_action():
            super()._check_spaces(observation_space, action_space)
            self._codec.adopt(action_space)
            return
        if self.action_kinds and action_kind_of(action_space) not in self.action_kinds:
            raise SpaceError(
                f"{type(self).__name__} supports {', '.join(self.action_kinds)} actions, but the "
                f"environment takes {action_space}; use PPO, or wrap the environment"
            )
        # The model is tried, for which the codec has to know what its outputs mean.
        self._codec.adopt(action_space)
        super()._check_spaces(observation_space, action_space)


def only_bounding(bounding: ActionBounding, reason: str) -> Option:
    """Return the option ``action_bounding`` of an algorithm that learns with one value only.

    Args:
        bounding: that value.
        reason: the meaning of the option, for the reference.
    """
    return Option(bounding, one_of(bounding), reason)


class ActorOptions(PartsOptions, total=False):
    """The options that all actor policies have in ``for_env``."""

    action_low: Sequence[Any] | None
    action_high: Sequence[Any] | None
    action_bounding: ActionBounding


class ActorPolicy(CodecPolicy):
    """A policy whose model returns a distribution over actions: ``logit``, ``mu`` and ``sigma``.

    Discrete, MultiDiscrete, MultiBinary, floating-point Box, and Dict and Tuple spaces of them are
    supported; :class:`ActionCodec` describes ``action_bounding`` and what the model returns. The
    bounds of a Box come from ``action_low`` and ``action_high``; where these are None, from the
    first environment, unless actions were used without bounds before. Without bounds, actions are
    not clipped.

    Evaluating takes the most likely action, or, with ``deterministic=False``, draws one.
    """

    is_stochastic: ClassVar[bool] = True
    config: ClassVar[dict[str, Any]] = {
        "action_low": Option(
            None,
            optional(_BOUND),
            "lower bounds of a Box of actions; None uses the environment's",
        ),
        "action_high": Option(
            None,
            optional(_BOUND),
            "upper bounds of a Box of actions; None uses the environment's",
        ),
        "action_bounding": Option(
            "rescale",
            one_of("rescale", "clip", "tanh"),
            "how to keep actions within the bounds: by mapping [-1, 1] to them, by clipping, or by "
            "mapping the tanh of a Gaussian to them",
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

    def _make_codec(self) -> ActionCodec:
        cfg = self._cfg
        return ActionCodec(
            self._model_action(),
            bounding=cfg.action_bounding,
            low=cfg.action_low,
            high=cfg.action_high,
        )

    def _actor_output(self, obs: Value) -> dict[str, torch.Tensor]:
        """Return the actor's outputs, without running the critic if possible."""
        compute = getattr(self._model, "compute_actor", None)
        if compute is None:
            # A model that consists of actor and critic needs no forward of its own.
            actor = self._parts.get("actor")
            compute = self._model if actor is None else actor.module
        output: dict[str, torch.Tensor] = compute(obs)
        return output

    def _forward_eval_batch(
        self,
        obs: Value,
        env_id: np.ndarray,
        *,
        deterministic: bool = True,
        action_mask: Nested | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        return self._acted(obs, action_mask, None if deterministic else self._eval_generator)

    def _acted(
        self, obs: Value, action_mask: Nested | None, generator: torch.Generator | None
    ) -> dict[str, Any]:
        """Return ``{"action"}``, the actor's most likely ones, or draws from a generator."""
        distribution = self._acting_distribution(self._actor_output(obs), obs, action_mask)
        return self._chosen_action(distribution, generator)
