"""Running mean and variance, to normalize observations and rewards."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from dmiddleware.errors import CheckpointMismatch, NonFiniteData, StructureError
from dmiddleware.rl.recurrence import discounted_scan
from dmiddleware.settings import Fraction, Positive, checked

__all__ = ["RunningMeanStd", "RewardNormalizer"]


class RunningMeanStd:
    """Running mean and variance, in float64.

    Batches are merged with the parallel formula of Chan, Golub and LeVeque ("Updating Formulae and
    a Pairwise Algorithm for Computing Sample Variances", 1979), so neither the size nor the order
    of batches matters beyond rounding.

    Args:
        shape: shape of one item, ``()`` for scalars.
        eps: added to the variance before the square root.
        device: the device of the statistics and the inputs.
        in_place: whether updates write to the same tensors, as replayed CUDA graphs need.

    Attributes:
        mean: ``shape`` float64, 0 before the first update.
        var: ``shape`` float64, population variance, 1 before the first update.
        count: number of items seen.
    """

    def __init__(
        self,
        shape: Sequence[int] = (),
        *,
        eps: float = 1e-8,
        device: torch.device | str = "cpu",
        in_place: bool = False,
    ) -> None:
        self._shape = tuple(shape)
        self._in_place = in_place
        self._eps: float = checked("eps", eps, Positive)
        self.mean = torch.zeros(self._shape, dtype=torch.float64, device=device)
        self.var = torch.ones(self._shape, dtype=torch.float64, device=device)
        self.count = 0
        self._scale = self.std.reciprocal()

    @property
    def std(self) -> torch.Tensor:
        """The square root of ``var + eps``, float64."""
        return (self.var + self._eps).sqrt()

    @torch.no_grad()
    def update(self, batch: torch.Tensor) -> None:
        """Add items ``[…, *shape]`` of any dtype; an empty batch changes nothing.

        Values on a device are not checked, because checking waits for the device; the collector
        that made them finds those that are not finite.

        Raises:
            StructureError: if the items are of another shape.
            NonFiniteData: if one of them, on the CPU, is NaN or infinite; nothing has changed.
        """
        items = self._as_items(batch)
        n_new = items.shape[0]
        if n_new == 0:
            return
        new_mean = items.mean(0)
        new_var = (items - new_mean).square_().mean(0)
        if items.is_cpu and not math.isfinite(new_mean.sum() + new_var.sum()):
            _check_finite("the items", items)
            raise NonFiniteData(
                f"the items reach {items.abs().max().item():g}, whose variance is infinite; scale "
                "them first"
            )
        self.merge(n_new, new_mean, new_var)

    @torch.no_grad()
    def merge(self, count: int, mean: torch.Tensor, var: torch.Tensor) -> None:
        """Add items of which only the statistics are known.

        Args:
            count: their number, above 0.
            mean: their mean, ``shape`` float64.
            var: their population variance, likewise.
        """
        if self.count > 0:
            total = self.count + count
            share = count / total
            delta = mean - self.mean
            mean = self.mean + delta * share
            var = self.var * (1.0 - share) + var * share + delta.square() * share * (1.0 - share)
        self.count += count
        self._put(mean, var)

    @torch.no_grad()
    def normalize(self, batch: torch.Tensor, *, clip: float | None = 10.0) -> torch.Tensor:
        """Return ``(batch - mean) / std`` as float32.

        Args:
            batch: ``[…, *shape]`` of any dtype.
            clip: bound of the result's absolute value; None: no bound.
        """
        # In float64: a mean that is large next to its deviation has too few digits in float32. That
        # of bytes never is.
        wide = torch.float32 if batch.dtype is torch.uint8 else torch.float64
        scaled = (batch.to(wide) - self.mean.to(wide)).mul_(self._scale.to(wide)).float()
        return scaled if clip is None else scaled.clamp_(-clip, clip)

    @torch.no_grad()
    def denormalize(self, batch: torch.Tensor) -> torch.Tensor:
        """Return ``batch * std + mean`` as float32: the inverse of an unclipped normalization."""
        return (batch / self._scale).add_(self.mean).float()

    def set_to(self, other: RunningMeanStd) -> None:
        """Take the present statistics of another one, of the same shape and on the same device.

        Nothing is copied, because an update replaces the tensors and never writes to them, unless
        they are kept in place.
        """
        self.count = other.count
        self._put(other.mean, other.var)

    def state_dict(self) -> dict[str, Any]:
        """Return the statistics: ``mean`` and ``var`` (copies, on the CPU) and ``count``."""
        return {
            "mean": self.mean.cpu().clone(),
            "var": self.var.cpu().clone(),
            "count": self.count,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the statistics.

        Raises:
            CheckpointMismatch: if they belong to items of another shape.
        """
        shape = tuple(state["mean"].shape)
        if shape != self._shape:
            raise CheckpointMismatch(
                f"these statistics belong to items of shape {shape}, this normalizer is for shape "
                f"{self._shape}; load them into one of the same observation shape"
            )
        device = self.mean.device
        self.count = int(state["count"])
        mean, var = (state[name].to(device, torch.float64, copy=True) for name in ("mean", "var"))
        self._put(mean, var)

    def _as_items(self, batch: torch.Tensor) -> torch.Tensor:
        n_lead = batch.dim() - len(self._shape)
        if n_lead < 0 or tuple(batch.shape[n_lead:]) != self._shape:
            raise StructureError(
                f"a batch of shape {tuple(batch.shape)} does not end in the item shape "
                f"{self._shape} that this normalizer was made for"
            )
        return batch.to(torch.float64).reshape(-1, *self._shape)

    def _put(self, mean: torch.Tensor, var: torch.Tensor) -> None:
        if not self._in_place:
            self.mean, self.var = mean, var
            self._scale = self.std.reciprocal()
            return
        self.mean.copy_(mean)
        self.var.copy_(var)
        self._scale.copy_(self.std.reciprocal())


class RewardNormalizer:
    """Scale rewards by the running standard deviation of the discounted return.

    The return of each episode is followed forwards in time, ``R = discount * R + reward``, from
    batch to batch; rewards are divided by its standard deviation and not shifted (Engstrom et al.,
    "Implementation Matters in Deep Policy Gradients", 2020, appendix A.2). Batches of any number of
    environments and collectors may come in any order, as long as those of one episode are in order.

    Args:
        discount: gamma, in ``[0, 1]``.
        clip: bound of a scaled reward's absolute value; None: no bound.
        return_stats: the statistics of returns; None: new ones.
    """

    # Episodes cut by an env failure never finish; the oldest beyond this number are dropped.
    _MAX_UNFINISHED = 65_536

    def __init__(
        self,
        *,
        discount: float,
        clip: float | None = 10.0,
        return_stats: RunningMeanStd | None = None,
    ) -> None:
        self._discount: float = checked("discount", discount, Fraction)
        self._clip = clip
        self._return_stats = RunningMeanStd() if return_stats is None else return_stats
        # The return so far of each unfinished episode, by episode id.
        self._unfinished: dict[int, float] = {}

    @property
    def std(self) -> float:
        """The standard deviation by which rewards are divided."""
        return float(self._return_stats.std)

    @torch.no_grad()
    def update(self, reward: torch.Tensor, done: torch.Tensor, episode_id: torch.Tensor) -> None:
        """Follow the returns over new rewards.

        Args:
            reward: ``[T, E]``, not yet scaled; each column is one environment in order of time.
            done: bool ``[T, E]``, True where an episode ended.
            episode_id: int64 ``[T, E]``; a new id starts a new return, also where an environment
                failed before its episode was done.

        Raises:
            StructureError: if the shapes differ.
            NonFiniteData: if a reward is NaN or infinite; nothing has changed.
        """
        if not reward.shape == done.shape == episode_id.shape or reward.dim() != 2:
            raise StructureError(
                f"reward {tuple(reward.shape)}, done {tuple(done.shape)} and episode_id "
                f"{tuple(episode_id.shape)} must all be [T, E]"
            )
        if reward.numel() == 0:
            return
        if not math.isfinite(reward.sum(dtype=torch.float64)):
            _check_finite("the rewards", reward)
        starts = torch.ones_like(done)
        starts[1:] = episode_id[1:] != episode_id[:-1]
        if len(set(ids := episode_id[starts].tolist())) < len(ids):
            # Parts of one episode with others between them, as per-env collectors return them.
            order = episode_id.T.reshape(-1).argsort(stable=True)
            reward, done, episode_id = (
                column.T.reshape(-1)[order, None] for column in (reward, done, episode_id)
            )
            starts = torch.ones_like(done)
            starts[1:] = episode_id[1:] != episode_id[:-1]
        rewards = reward.to(torch.float64)
        # Forwards in time is backwards over the flipped rows; the factor of a row is 0 where the
        # row before it in time belongs to another episode.
        factor = torch.full_like(rewards, self._discount)
        factor[starts] = 0.0
        factor[1:][done[:-1]] = 0.0
        start = rewards.clone()
        so_far = [self._unfinished.pop(episode, 0.0) for episode in episode_id[starts].tolist()]
        start[starts] += self._discount * rewards.new_tensor(so_far)
        returns = discounted_scan(start.flip(0), factor.flip(0)).flip(0)
        self._return_stats.update(returns)
        cut = starts.roll(-1, 0) & ~done  # the last known rows of unfinished episodes
        self._unfinished.update(zip(episode_id[cut].tolist(), returns[cut].tolist(), strict=True))
        while len(self._unfinished) > self._MAX_UNFINISHED:
            del self._unfinished[next(iter(self._unfinished))]

    @torch.no_grad()
    def normalize(self, reward: torch.Tensor) -> torch.Tensor:
        """Return the rewards ``[…]`` divided by :attr:`std`, as float32, clipped."""
        scaled = (reward / self._return_stats.std).float()
        return scaled if self._clip is None else scaled.clamp_(-self._clip, self._clip)

    def state_dict(self) -> dict[str, Any]:
        """Return the statistics and the returns of unfinished episodes."""
        return {
            "return_stats": self._return_stats.state_dict(),
            "episode_id": torch.tensor(list(self._unfinished), dtype=torch.int64),
            "running": torch.tensor(list(self._unfinished.values()), dtype=torch.float64),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        self._return_stats.load_state_dict(state["return_stats"])
        ids, returns = state["episode_id"].tolist(), state["running"].tolist()
        self._unfinished = dict(zip(ids, returns, strict=True))


def _check_finite(what: str, values: torch.Tensor) -> None:
    """Reject values that are not finite.

    Raises:
        NonFiniteData: with the first of them and its place.
    """
    bad = (~values.isfinite()).nonzero()
    if len(bad):
        place = bad[0].tolist()
        raise NonFiniteData(
            f"{what} have {values[tuple(place)].item()} at {place} of {list(values.shape)}, which "
            "would ruin the running statistics; they were not changed. Check the environment or "
            "the data set for NaN and infinite values"
        )
