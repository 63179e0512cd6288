"""Policies that normalise their observations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from easydict import EasyDict

from dmiddleware.config import Option, check_value, optional, positive, switch
from dmiddleware.data.batch import Batch, Nested, Value
from dmiddleware.errors import ConfigError
from dmiddleware.policy.base.actions import ActorPolicy, CodecPolicy
from dmiddleware.policy.base.obs_normaliser import ObsNormaliser
from dmiddleware.policy.base.parts import Part
from dmiddleware.policy.base.parts_policy import PartsOptions

__all__ = ["DatasetNormPolicy", "ObsNormOptions", "ObsNormPolicy"]

# Fujimoto and Gu (2021), equation 4, add 1e-3 to the standard deviation.
_EPS = 1e-3**2


class ObsNormOptions(PartsOptions, total=False):
    """The options that all policies that normalise observations have in ``for_env``."""

    obs_norm: bool
    norm_clip: float | None


class ObsNormPolicy(CodecPolicy):
    """A policy with an option ``obs_norm``, and statistics that belong to it.

    What an algorithm writes needs no knowledge of it: observations are normalised before they reach
    its acting and its update, whatever the order of its base classes.

    Collecting updates the statistics; evaluating does not. Rows are stored unnormalised, and
    normalised by the newest statistics whenever they are learned from. An on-policy algorithm
    learns with the statistics with which it collected. The statistics are saved with the policy.
    """

    counts_collected: ClassVar[bool] = True
    """Whether collecting updates the statistics."""
    config: ClassVar[dict[str, Any]] = {
        "obs_norm": Option(
            False, switch, "whether to normalise observations by running statistics"
        ),
        "norm_clip": Option(
            10.0,
            optional(positive),
            "largest absolute value of normalised observations; None does not clip",
        ),
    }

    @classmethod
    def check_config(cls, cfg: EasyDict) -> None:
        """Reject invalid combinations."""
        super().check_config(cfg)
        check_value(
            not (cls.counts_collected and cfg.multi_gpu and cfg.obs_norm),
            "multi_gpu",
            cfg.multi_gpu,
            "False with obs_norm, since the ranks would have different statistics",
        )

    def _init_common(self) -> None:
        super()._init_common()
        self._obs_normaliser: ObsNormaliser | None = None
        # A policy with only the command mode has no model.
        if not self._cfg.obs_norm or not hasattr(self, "_model"):
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

    def _as_seen(self, obs: Value, *, collecting: bool = False) -> Value:
        """Return observations normalised; those that are collected update the statistics before."""
        if self._obs_normaliser is None:
            return obs
        if collecting and self.counts_collected:
            self._count_observations(obs)
        normalised: Value = self._obs_normaliser(obs)
        return normalised

    def _rows_as_seen(self, batch: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the columns of a batch, ``obs`` and ``next_obs`` normalised."""
        if self._obs_normaliser is None:
            return batch
        names = [name for name in ("obs", "next_obs") if name in batch]
        return {**batch, **{name: self._as_seen(batch[name]) for name in names}}

    def _forward_learn(self, batch: Batch, **kwargs: Any) -> Any:
        if self._obs_normaliser is not None and self.on_policy:
            self._obs_normaliser.hold()
        return super()._forward_learn(batch, **kwargs)

    def _normalised(self, obs: Value) -> Value:
        """Return what is given: it is normalised already. Older algorithms call it."""
        return obs

    def _collected(self, obs: Value) -> Value:
        """Return what is given: it is counted and normalised. Older algorithms call it."""
        return obs

    def _count_collected(self, obs: Value) -> None:
        """Do nothing: observations are counted before. Older algorithms call it."""

    def _normalised_rows(self, batch: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return what is given: it is normalised already. Older algorithms call it."""
        return batch

    def _make_parts(self) -> dict[str, Part]:
        parts = super()._make_parts()
        if self._obs_normaliser is not None:
            parts["obs_normaliser"] = Part(self._obs_normaliser, acts=True)
        return parts


class DatasetNormPolicy(ObsNormPolicy, ActorPolicy):
    """An actor policy whose observations have mean 0 and standard deviation 1 over its data set.

    :meth:`observe` takes the observations of the data set once, before learning, all at once or one
    part after the other.
    """

    counts_collected: ClassVar[bool] = False
    config: ClassVar[dict[str, Any]] = {
        "obs_norm": Option(
            True,
            switch,
            "whether to normalise observations with the mean and standard deviation of the data "
            "set, which observe() takes",
        ),
        "norm_clip": None,
    }

    def _make_obs_normaliser(self, obs_shape: Any) -> ObsNormaliser:
        return ObsNormaliser(obs_shape, clip=self._cfg.norm_clip, eps=_EPS, device=self._device)

    def _forward_learn(self, batch: Batch, **kwargs: Any) -> Any:
        if self._obs_normaliser is not None and not self._obs_normaliser.has_seen_all:
            raise ConfigError(
                f"{type(self).__name__} has obs_norm=True, but knows nothing of the data set yet; "
                "call policy.observe(rows['obs']) with its observations before learning, or set "
                "obs_norm=False"
            )
        return super()._forward_learn(batch, **kwargs)
