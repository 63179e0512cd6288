"""Policies that normalise their observations."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar, Final

from dmiddleware.config import Option, switch
from dmiddleware.data.batch import Batch, Nested, Value
from dmiddleware.errors import ConfigError
from dmiddleware.policy.base.actions import ActorOptions, ActorPolicy, CodecPolicy
from dmiddleware.policy.base.obs_normaliser import ObsNormaliser
from dmiddleware.policy.base.parts import Part

__all__ = ["OBS_NORM", "DatasetNormOptions", "DatasetNormPolicy", "ObsNormPolicy"]

OBS_NORM: Final = Option(False, switch, "whether to normalise observations by running statistics")
"""The option ``obs_norm`` of policies whose collecting updates the statistics."""

# Fujimoto and Gu (2021), equation 4, add 1e-3 to the standard deviation.
_EPS = 1e-3**2


class ObsNormPolicy(CodecPolicy):
    """A policy with an option ``obs_norm``, and statistics that belong to it.

    The statistics are saved with the policy, and it acts with them.
    """

    def _init_common(self) -> None:
        super()._init_common()
        self._obs_normaliser: ObsNormaliser | None = None
        # A policy with only the command mode has no model.
        if not self._cfg.get("obs_norm", False) or not hasattr(self, "_model"):
            return
        obs_shape = getattr(self._model, "obs_shape", self._cfg.model.get("obs_shape"))
        if obs_shape is None:
            raise ConfigError(
                "obs_norm is True, but the shape of observations is unknown: the model "
                f"{type(self._model).__name__} has no attribute obs_shape; set model.obs_shape"
            )
        self._obs_normaliser = self._make_obs_normaliser(obs_shape)

    def _make_obs_normaliser(self, obs_shape: Any) -> ObsNormaliser:
        return ObsNormaliser(obs_shape, clip=self._cfg.norm_clip, device=self._device)

    def observe(self, obs: Nested) -> None:
        """Add observations that another process or a data set supplied to the statistics.

        Args:
            obs: ``[…, *obs_shape]``; see :meth:`Policy.observe`.
        """
        if self._obs_normaliser is not None:
            self._count_observations(self._as_obs(obs))

    def _count_observations(self, obs: Nested) -> None:
        """Add observations on the policy's device to the statistics, if there are any."""
        if self._obs_normaliser is not None:
            self._obs_normaliser.update(obs)

    def _normalised(self, obs: Value) -> Value:
        if self._obs_normaliser is None:
            return obs
        normalised: Value = self._obs_normaliser(obs)
        return normalised

    def _collected(self, obs: Value) -> Value:
        """Add observations to act on to the statistics, and return them normalised."""
        self._count_observations(obs)
        return self._normalised(obs)

    def _normalised_rows(self, batch: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the columns of a minibatch, ``obs`` and ``next_obs`` normalised."""
        if self._obs_normaliser is None:
            return batch
        seen = {name: self._normalised(batch[name]) for name in ("obs", "next_obs")}
        return {**batch, **seen}

    def _make_parts(self) -> dict[str, Part]:
        parts = super()._make_parts()
        if self._obs_normaliser is not None:
            parts["obs_normaliser"] = Part(self._obs_normaliser, acts=True)
        return parts


class DatasetNormOptions(ActorOptions, total=False):
    """The options that all policies with the statistics of a data set have in ``for_env``."""

    obs_norm: bool


class DatasetNormPolicy(ObsNormPolicy, ActorPolicy):
    """An actor policy whose observations have mean 0 and standard deviation 1 over its data set.

    :meth:`observe` takes the observations of the data set once, before learning, all at once or one
    part after the other.
    """

    config: ClassVar[dict[str, Any]] = {
        "obs_norm": Option(
            True,
            switch,
            "whether to normalise observations with the mean and standard deviation of the data "
            "set, which observe() takes",
        ),
    }

    def _make_obs_normaliser(self, obs_shape: Any) -> ObsNormaliser:
        return ObsNormaliser(obs_shape, clip=math.inf, eps=_EPS, device=self._device)

    def _forward_learn(self, batch: Batch, **kwargs: Any) -> Any:
        if self._obs_normaliser is not None and not self._obs_normaliser.has_seen_all:
            raise ConfigError(
                f"{type(self).__name__} has obs_norm=True, but knows nothing of the data set yet; "
                "call policy.observe(rows['obs']) with its observations before learning, or set "
                "obs_norm=False"
            )
        return super()._forward_learn(batch, **kwargs)
