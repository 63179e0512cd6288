"""How much of a processor core a learner with many collectors needs: a linear model.

::

    share = n · (idle + batches · (a + b · batch_bytes) + (c + d · weights_bytes) / weights_every)
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["HubCost", "HubShare", "Line", "Load"]


@dataclass(frozen=True, slots=True)
class Line:
    """A cost that grows with the size of an event.

    Attributes:
        fixed_s: seconds for an event without content.
        byte_s: seconds for each byte.
    """

    fixed_s: float
    byte_s: float

    @classmethod
    def through(cls, small: tuple[int, float], large: tuple[int, float]) -> Line:
        """Return the line through two measurements: a size in bytes, and seconds.

        Raises:
            ValueError: if the second size is not larger.
        """
        (small_bytes, small_s), (large_bytes, large_s) = small, large
        if large_bytes <= small_bytes:
            raise ValueError(f"{large_bytes} bytes is not larger than {small_bytes} bytes")
        # Noise must not make large events cheaper than small ones.
        byte_s = max(0.0, large_s - small_s) / (large_bytes - small_bytes)
        return cls(max(0.0, small_s - byte_s * small_bytes), byte_s)

    def at(self, n_bytes: float) -> float:
        """Return the seconds for an event of this size."""
        return self.fixed_s + self.byte_s * n_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What each collector sends and receives.

    Attributes:
        batches: batches that it sends each second.
        batch_bytes: the size of a batch.
        weights_bytes: the size of the weights.
        weights_every_s: seconds between two versions of the weights.
    """

    batches: float
    batch_bytes: float
    weights_bytes: float
    weights_every_s: float


@dataclass(frozen=True, slots=True)
class HubShare:
    """The shares of a core that a learner needs; 1 is a whole core.

    Attributes:
        idle: for heartbeats.
        batches: for receiving batches.
        weights: for sending weights.
    """

    idle: float
    batches: float
    weights: float

    @property
    def total(self) -> float:
        """The sum."""
        return self.idle + self.batches + self.weights


@dataclass(frozen=True, slots=True, kw_only=True)
class HubCost:
    """What one collector costs the learner, in seconds of processor time.

    Attributes:
        idle_s: for each second in which nothing is sent.
        batch: for each batch received.
        weights: for each version of the weights.
    """

    idle_s: float
    batch: Line
    weights: Line

    def share(self, n: float, load: Load) -> HubShare:
        """Return what ``n`` collectors need."""
        return HubShare(
            idle=n * self.idle_s,
            batches=n * load.batches * self.batch.at(load.batch_bytes),
            weights=n * self.weights.at(load.weights_bytes) / load.weights_every_s,
        )

    def most_collectors(self, load: Load) -> int:
        """Return how many collectors fill one core."""
        return int(1.0 / self.share(1, load).total)

    def most_batches(self, n: float, load: Load) -> float:
        """Return how many batches a second fill one core; 0 if the rest already does.

        Args:
            n: the number of collectors.
            load: the load, whose rate of batches does not count.
        """
        share = self.share(n, load)
        return max(0.0, 1.0 - share.idle - share.weights) / self.batch.at(load.batch_bytes)
