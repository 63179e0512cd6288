"""DI-engine's fetchers: put a batch to learn from into the context."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from dmiddleware.data import OfflineDataset, ReplayBuffer
from dmiddleware.errors import NotEnoughData
from dmiddleware.pipeline import ChainView, Task
from dmiddleware.settings import Count, checked
from middleware.base import BaseMiddleware
from middleware.context import OfflineRLContext, RLContext
from middleware.roles import Role
from middleware.support.dataset_reader import DatasetReader, check_dataset
from middleware.support.replay import (
    SkippedDraws,
    check_buffer,
    check_start,
    counters_for,
    update_priorities,
)

__all__ = [
    "OffPolicyDataFetcher",
    "OfflineDataFetcher",
    "offline_data_fetcher",
    "offpolicy_data_fetcher",
]


class OffPolicyDataFetcher(BaseMiddleware[RLContext]):
    """Draw a batch from a buffer; on the way back, write the new priorities to the buffer.

    Args:
        buffer: where batches come from.
        batch_size: rows in a batch.
        learn_start: rows that the buffer must hold before the first batch; None: ``batch_size``.
            Until then ``ctx.train_data`` is None and trainers do nothing.

    Reads:
        ctx.train_output: on the way back, for its ``priority``.

    Writes:
        ctx.train_data: a batch ``[batch_size, …]``; None while the buffer fills, while it has too
            few rows to sample, and while an exchange pauses learning to keep its pace.
        ctx.trained_env_step: with the rows drawn.

    Raises:
        ConfigError: if ``buffer`` is not a buffer, ``batch_size`` is not positive, or
            ``learn_start`` is less than it, or more than the buffer's size.
    """

    roles = (Role.LEARNER,)
    reads = ("train_output",)
    writes = ("train_data",)

    def __init__(
        self, buffer: ReplayBuffer, *, batch_size: int, learn_start: int | None = None
    ) -> None:
        check_buffer(buffer)
        batch_size = checked("batch_size", batch_size, Count)
        self._buffer = buffer
        self._batch_size = batch_size
        self._start = check_start(buffer, batch_size=batch_size, learn_start=learn_start)
        self._skipped = SkippedDraws()
        self._counters = counters_for(buffer, {})
        self.draws_from = (buffer,)
        self.components = {"buffer": buffer}
        self.snapshot_parts = {"buffer": buffer}
        self.settings = {"batch_size": batch_size, "learn_start": self._start}

    def bind(self, chain: ChainView) -> None:
        """Take the limits of the chain, which schedules by progress depend on."""
        self._counters.bind(chain)

    def preflight(self, chain: ChainView) -> Iterable[str]:
        """Refuse schedules of the buffer by a counter that the chain does not have."""
        return self._counters.preflight(chain)

    def __call__(self, ctx: RLContext) -> Iterator[None]:
        """Draw a batch."""
        buffer, batch_size = self._buffer, self._batch_size
        if len(buffer) < self._start or ctx.learning_held:
            return
        counters = self._counters.of(ctx)
        try:
            (batch,) = buffer.sample_ahead(batch_size, at_most=1, counters=counters)
        except NotEnoughData as error:
            self._skipped.add(ctx, error)
            return
        ctx.train_data = batch
        ctx.trained_env_step += batch_size * (buffer.unroll_len or 1)
        yield
        output = ctx.train_output
        if output is not None:
            update_priorities(buffer, batch, output if isinstance(output, list) else [output])


class OfflineDataFetcher(BaseMiddleware[OfflineRLContext]):
    """Read the next minibatch of a dataset, epoch after epoch, each in a new random order.

    Args:
        dataset: the dataset. It stays open; its owner closes it.
        batch_size: rows in a minibatch; rows that are left over at the end of an epoch are skipped.

    Reads:
        ctx.trained_env_step: incremented.

    Writes:
        ctx.train_data: a batch ``[batch_size, …]``.
        ctx.train_epoch: passes over the dataset that are finished with this minibatch.
        ctx.trained_env_step: plus ``batch_size``.

    Raises:
        ConfigError: if ``dataset`` is not an OfflineDataset, or ``batch_size`` is not positive.
        NotEnoughData: if the dataset has fewer rows than a minibatch.
    """

    roles = (Role.LEARNER,)
    reads = ("train_epoch", "trained_env_step")
    writes = ("train_data", "train_epoch", "trained_env_step")

    def __init__(self, dataset: OfflineDataset, *, batch_size: int) -> None:
        check_dataset(dataset, user="offline_data_fetcher")
        batch_size = checked("batch_size", batch_size, Count)
        self._reader = DatasetReader(dataset, batch_size=batch_size)
        self.computes_n_step = self._reader.has_n_step
        self.settings = {"batch_size": batch_size}
        self.components = {"dataset": dataset.path}

    def setup(self, task: Task[Any]) -> None:
        """Seed the order of the minibatches from the task's seed."""
        self._reader.setup(task)

    def __call__(self, ctx: OfflineRLContext) -> None:
        """Read a minibatch."""
        ctx.train_data = self._reader.read()
        self._reader.count(ctx)

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the dataset."""
        return self._reader.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        self._reader.load_state_dict(state)


offline_data_fetcher = OfflineDataFetcher
"""DI-engine's name of :class:`OfflineDataFetcher`."""

offpolicy_data_fetcher = OffPolicyDataFetcher
"""DI-engine's name of :class:`OffPolicyDataFetcher`."""
