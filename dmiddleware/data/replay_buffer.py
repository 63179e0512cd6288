"""What a chain needs of a replay buffer."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from dmiddleware.schedule import Counters, Schedule
from dmiddleware.tree import Batch

__all__ = ["ReplayBuffer"]


@runtime_checkable
class ReplayBuffer(Protocol):
    """The interface of a replay buffer, as the stock middleware use it.

    :class:`~dmiddleware.data.TensorBuffer` has it; so may a buffer of your own.
    """

    @property
    def size(self) -> int:
        """Capacity in rows."""
        ...

    @property
    def settings(self) -> dict[str, Any]:
        """The class and the arguments that are plain values, which a run saves."""
        ...

    @property
    def schedules(self) -> Mapping[str, Schedule]:
        """The settings that are schedules, by name."""
        ...

    @property
    def reads_counters(self) -> bool:
        """Whether draws read the counters although no setting is a schedule."""
        ...

    @property
    def lacks_priorities(self) -> bool:
        """Whether rows are drawn by priority, but no priority was ever set."""
        ...

    @property
    def n_step(self) -> int | None:
        """The number of steps that a sampled ``reward`` sums over; None: not known."""
        ...

    @property
    def unroll_len(self) -> int | None:
        """The number of rows that a sequence has to learn from; None for single rows."""
        ...

    def bind(
        self,
        *,
        n_step: int,
        discount: float | None,
        burn_in: int | None,
        start_columns: Collection[str],
    ) -> None:
        """Take what the policy knows, until the first push; then compare it.

        Args:
            n_step: length of the policy's n-step returns.
            discount: the policy's γ; None if it has none.
            burn_in: the policy's burn-in; None if it has none.
            start_columns: the columns that the policy needs only where sequences start.

        Raises:
            ConfigError: if the buffer was built with another burn-in, or sums rewards over another
                number of steps or with another discount.
        """
        ...

    def __len__(self) -> int:
        """Return the number of rows held."""
        ...

    def push(self, batch: Batch, /) -> Sequence[int]:
        """Store collected rows.

        Args:
            batch: ``[N, …]`` or ``[T, E, …]``.

        Returns:
            The indices of the rows stored, in the order of the batch; of more rows than fit, only
            the newest are stored.
        """
        ...

    def sample_ahead(
        self, n: int, *, at_most: int, counters: Counters | None = None
    ) -> list[Batch]:
        """Draw batches for one or several updates in a row.

        Args:
            n: number of rows, or of sequences, of each batch.
            at_most: the most batches to draw.
            counters: how far the run is.

        Returns:
            One to ``at_most`` batches ``[n, …]``, or ``[L, n, …]`` with ``unroll_len``, each with
            the column ``index`` int64 ``[n]``, and ``weight`` float32 ``[n]`` if rows have
            importance weights.

        Raises:
            NotEnoughData: if fewer than ``n`` rows can be drawn.
        """
        ...

    def update_priority(self, index: Any, priority: Any) -> int:
        """Set the priorities of rows; those that are no longer held are skipped.

        Args:
            index: int64 ``[n]``.
            priority: ``[n]``, not negative, finite.

        Returns:
            The number of rows whose priority was set.
        """
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return everything that later samples depend on."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        ...
