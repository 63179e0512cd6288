"""Normalization of observations by statistics that are fixed while a batch is learned from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch

from dmiddleware.errors import CheckpointMismatch, ConfigError, NonFiniteData, StructureError
from dmiddleware.model.spaces import array_shape, is_one_hot, joined_shape, shape_leaves
from dmiddleware.policy.policy_settings import PolicySettings
from dmiddleware.policy.rank_statistics import RankMeanStd
from dmiddleware.rl import RunningMeanStd
from dmiddleware.settings import Positive
from dmiddleware.tree import Batch, Nested, as_tree

__all__ = ["DatasetNormSettings", "ObsNorm", "ObsNormSettings"]

# Fujimoto and Gu (2021), equation 4, add 1e-3 to the standard deviation.
_DATASET_EPS: Final = 1e-3**2


class ObsNormSettings(PolicySettings):
    """The settings of policies that can normalize observations."""

    obs_norm: bool = False
    """Whether to normalize observations by running statistics."""
    norm_clip: Positive | None = 10.0
    """Largest absolute value of normalized observations; None does not clip."""


class DatasetNormSettings(ObsNormSettings):
    """The settings of policies that normalize observations by the statistics of a dataset."""

    obs_norm = True
    """Whether to normalize observations with the mean and standard deviation of the dataset, which
    observe() takes."""
    norm_clip: Positive | None = None


class ObsNorm:
    """Shifts and scales observations to mean 0 and standard deviation 1, and clips them.

    New observations update running statistics; observations are normalized with a published copy
    of them. A policy that learns from a batch calls :meth:`hold`; from then on statistics are
    published only with the first new observations after learning. A batch therefore looks the same
    to the learner as to the collector, and importance ratios start at 1. Before the first
    :meth:`hold`, every update is published at once.

    Each number has its own statistics, and so has each pixel of an image: what moves stands out
    from a background that does not. One-hot integers pass unchanged.

    With several ranks, the statistics are those of what all ranks had seen when they last learned;
    until they learn for the first time, each rank uses those of what it has seen itself.

    Args:
        obs_shape: see :mod:`dmiddleware.model.spaces`; None: observations pass unchanged.
        clip: bound of the result's absolute value; None: no bound.
        eps: added to the variance before the square root.
        device: the device of the observations.
        of_dataset: whether the statistics are those of a data set: collecting does not update them,
            and learning needs them.
        select: returns the observations that count; None: all do.
        make_statistics: makes the running statistics of a shape.
    """

    def __init__(
        self,
        obs_shape: Any,
        *,
        clip: float | None = 10.0,
        eps: float = 1e-8,
        device: torch.device | str = "cpu",
        of_dataset: bool = False,
        select: Callable[[Nested], Nested] | None = None,
        make_statistics: Callable[..., RunningMeanStd] = RunningMeanStd,
    ) -> None:
        self.is_on = obs_shape is not None
        self.of_dataset = of_dataset
        self._clip = clip
        self._select = select
        shapes = {
            path: array_shape(shape)
            for path, shape in shape_leaves(obs_shape)
            if not is_one_hot(shape)
        } if self.is_on else {}  # fmt: skip
        options: dict[str, Any] = {"eps": eps, "device": device}
        self._running = {p: make_statistics(s, **options) for p, s in shapes.items()}
        self._published = {p: RunningMeanStd(s, **options) for p, s in shapes.items()}
        self._held = False
        self._learned = False

    @classmethod
    def for_policy(
        cls,
        cfg: object,
        model: object,
        *,
        device: str,
        select: Callable[[Nested], Nested] | None,
        make_statistics: Callable[..., RunningMeanStd],
    ) -> ObsNorm:
        """Build the normalization that a policy's options ask for.

        Args:
            cfg: the settings of the policy.
            model: its model, which may know the shape of observations.
            device: its device.
            select: as in the class.
            make_statistics: likewise.

        Raises:
            ConfigError: if observations are to be normalized, but nothing says what they are.
        """
        if not isinstance(cfg, ObsNormSettings) or not cfg.obs_norm:
            return cls(None)
        obs_shape = getattr(model, "obs_shape", cfg.model.get("obs_shape"))
        if obs_shape is None:
            raise ConfigError(
                "obs_norm is True, but the shape of observations is unknown: the model "
                f"{type(model).__name__} has no attribute obs_shape; set model.obs_shape"
            )
        critic = getattr(model, "critic_obs_shape", cfg.model.get("critic_obs_shape"))
        if critic is not None:
            obs_shape = joined_shape(obs_shape, critic)
        of_dataset = isinstance(cfg, DatasetNormSettings)
        return cls(
            obs_shape,
            clip=cfg.norm_clip,
            eps=_DATASET_EPS if of_dataset else 1e-8,
            device=device,
            of_dataset=of_dataset,
            select=select,
            make_statistics=make_statistics,
        )

    @property
    def has_seen_all(self) -> bool:
        """Whether every statistic has been updated at least once."""
        return all(stats.count > 0 for stats in self._running.values())

    def collected(self, obs: Any) -> Any:
        """Return observations ``[E, …]`` normalized, after they have updated the statistics."""
        if not self.of_dataset:
            self.update(obs)
        return self._normalize(obs, ())

    def rows(self, batch: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the columns of a batch, ``obs`` and ``next_obs`` normalized."""
        names = [name for name in ("obs", "next_obs") if name in batch]
        return {**batch, **{name: self._normalize(batch[name], ()) for name in names}}

    def update(self, obs: Nested) -> None:
        """Add observations ``[…, *obs_shape]`` that a policy is about to act on."""
        if self._learned:
            self._publish()
            self._learned = False
        if self._select is not None:
            obs = self._select(obs)
        for path, stats in self._running.items():
            try:
                stats.update(_leaf(obs, path))
            except NonFiniteData as error:
                error.add_note(f"these are observations, the leaf {_name(path)}")
                raise
        self.follow()

    def follow(self) -> None:
        """Publish the running statistics, unless :meth:`hold` keeps the published ones."""
        if not self._held:
            self._publish()

    def hold(self) -> None:
        """Keep the published statistics until new observations arrive."""
        self._held = True
        self._learned = True

    def __call__(self, obs: Nested) -> Any:
        """Return the observations, normalized, float32, nested as they are."""
        return self._normalize(obs, ()) if self.is_on else obs

    def state_dict(self) -> dict[str, Any]:
        """Return both sets of statistics."""
        return {
            "running": {_name(p): stats.state_dict() for p, stats in self._running.items()},
            "published": {_name(p): stats.state_dict() for p, stats in self._published.items()},
            "held": self._held,
            "learned": self._learned,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore both sets of statistics.

        Raises:
            CheckpointMismatch: if they belong to other observations.
        """
        for name, statistics in (("running", self._running), ("published", self._published)):
            paths = {_name(path): stats for path, stats in statistics.items()}
            if set(paths) != set(state[name]):
                raise CheckpointMismatch(
                    f"the checkpoint normalizes the observations {sorted(state[name])}, this "
                    f"policy {sorted(paths)}; it belongs to another model: check cfg.model"
                )
            for path, stats in paths.items():
                stats.load_state_dict(state[name][path])
        self._held = bool(state["held"])
        self._learned = bool(state["learned"])

    def _publish(self) -> None:
        for path, stats in self._running.items():
            if isinstance(stats, RankMeanStd) and not stats.count:
                stats = stats.unshared
            self._published[path].set_to(stats)

    def _normalize(self, obs: Nested, path: tuple[str, ...]) -> Any:
        if isinstance(obs, Batch | Mapping):
            inner = {str(key): self._normalize(obs[key], (*path, str(key))) for key in obs}
            return as_tree(inner) if isinstance(obs, Batch) else inner
        stats = self._published.get(path)
        return obs if stats is None else stats.normalize(obs, clip=self._clip)


def _leaf(obs: Nested, path: tuple[str, ...]) -> torch.Tensor:
    for key in path:
        if key not in obs:
            raise StructureError(
                f"observations lack {_name(path)}, of which statistics are kept; if the policy has "
                "obs_groups, rows keep the parts of its groups alone: name this part in one of them"
            )
        obs = obs[key]
    assert isinstance(obs, torch.Tensor)
    return obs


def _name(path: tuple[str, ...]) -> str:
    return ".".join(("obs", *path))
