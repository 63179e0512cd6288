"""Observation normalisation with statistics that are fixed while a batch is learned from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from dmiddleware.data.batch import Batch, Nested, as_tree
from dmiddleware.errors import CheckpointMismatch, NonFiniteData
from dmiddleware.model.spaces import array_shape, is_one_hot, shape_leaves
from dmiddleware.rl import RunningMeanStd

__all__ = ["ObsNormaliser"]


class ObsNormaliser:
    """Shifts and scales observations to mean 0 and standard deviation 1, and clips them.

    New observations update running statistics; observations are normalised with a published copy
    of them. A policy that learns from a batch calls :meth:`hold`; from then on statistics are
    published only with the first new observations after learning. A batch therefore looks the same
    to the learner as to the collector, and importance ratios start at 1. Before the first
    :meth:`hold`, every update is published at once.

    Each number has its own statistics, and so has each pixel of an image: what moves stands out
    from a background that does not. One-hot integers pass unchanged.

    Args:
        obs_shape: see :mod:`dmiddleware.model.spaces`.
        clip: bound of the result's absolute value; None: no bound.
        eps: added to the variance before the square root.
        device: the device of the observations.
    """

    def __init__(
        self,
        obs_shape: Any,
        *,
        clip: float | None = 10.0,
        eps: float = 1e-8,
        device: torch.device | str = "cpu",
    ) -> None:
        self._clip = clip
        shapes = {
            path: array_shape(shape)
            for path, shape in shape_leaves(obs_shape)
            if not is_one_hot(shape)
        }
        options: dict[str, Any] = {"eps": eps, "device": device}
        self._running = {p: RunningMeanStd(s, **options) for p, s in shapes.items()}
        self._published = {p: RunningMeanStd(s, **options) for p, s in shapes.items()}
        self._held = False
        self._learned = False

    @property
    def has_seen_all(self) -> bool:
        """Whether every statistic has been updated at least once."""
        return all(stats.count > 0 for stats in self._running.values())

    def update(self, obs: Nested) -> None:
        """Add observations ``[…, *obs_shape]`` that a policy is about to act on."""
        if self._learned:
            self._publish()
            self._learned = False
        for path, stats in self._running.items():
            try:
                stats.update(_leaf(obs, path))
            except NonFiniteData as error:
                error.add_note(f"these are observations, the leaf {_name(path)}")
                raise
        if not self._held:
            self._publish()

    def hold(self) -> None:
        """Keep the published statistics until new observations arrive."""
        self._held = True
        self._learned = True

    def __call__(self, obs: Nested) -> Any:
        """Return the observations, normalised, float32, nested as they are."""
        return self._normalise(obs, ())

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
        for name, own in (("running", self._running), ("published", self._published)):
            paths = {_name(path): stats for path, stats in own.items()}
            if set(paths) != set(state[name]):
                raise CheckpointMismatch(
                    f"the checkpoint normalises the observations {sorted(state[name])}, this "
                    f"policy {sorted(paths)}; it belongs to another model: check cfg.model"
                )
            for path, stats in paths.items():
                stats.load_state_dict(state[name][path])
        self._held = bool(state["held"])
        self._learned = bool(state["learned"])

    def _publish(self) -> None:
        for path, stats in self._running.items():
            self._published[path].adopt(stats)

    def _normalise(self, obs: Nested, path: tuple[str, ...]) -> Any:
        if isinstance(obs, Batch | Mapping):
            inner = {str(key): self._normalise(obs[key], (*path, str(key))) for key in obs}
            return as_tree(inner) if isinstance(obs, Batch) else inner
        stats = self._published.get(path)
        return obs if stats is None else stats.normalise(obs, clip=self._clip)


def _leaf(obs: Nested, path: tuple[str, ...]) -> torch.Tensor:
    for key in path:
        obs = obs[key]
    assert isinstance(obs, torch.Tensor)
    return obs


def _name(path: tuple[str, ...]) -> str:
    return ".".join(("obs", *path))
