"""Fetching: batches for the trainer, from a buffer or from a data set."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from dmiddleware.data import Minibatches, OfflineDataset
from dmiddleware.pipeline import Middleware, OfflineRLContext, Role, Task, middleware
from middleware.support.checks import check_positive
from middleware.support.pace import count_drawn
from middleware.support.replay import ReplayBuffer, check_buffer, check_start, draw, give_back

__all__ = ["offline_data_fetcher", "offpolicy_data_fetcher"]


def offpolicy_data_fetcher(
    buffer: ReplayBuffer,
    *,
    batch_size: int,
    learn_start: int | None = None,
    tell_train_iter: bool = False,
) -> Middleware[Any]:
    """Draw a batch from a buffer; on the way back, give it the priorities that learning reported.

    Args:
        buffer: where batches come from.
        batch_size: rows in a batch.
        learn_start: rows that the buffer must hold before the first batch; at least, and by
            default, ``batch_size``. Until then ``ctx.train_data`` stays None and trainers do
            nothing.
        tell_train_iter: tell the buffer the iteration with each sample, as ``staleness_check``
            needs it.

    Reads:
        ctx.train_output: on the way back, for its ``priority``.

    Writes:
        ctx.train_data: a batch ``[batch_size, …]``; a list of samples if it comes from a
            :class:`~dmiddleware.data.DequeBuffer`. None while the buffer fills, or an exchange
            holds learning because it is ahead of its pace.
        ctx.trained_env_step: with the rows drawn, if someone counts them.

    Raises:
        ConfigError: if ``buffer`` is no buffer.
        ValueError: if ``batch_size`` is not positive, ``learn_start`` less than it, or more than
            the buffer ever holds.
    """
    check_buffer(buffer)
    check_positive(batch_size=batch_size)
    start = check_start(buffer, batch_size=batch_size, learn_start=learn_start)

    @middleware(roles=(Role.LEARNER,), reads=("train_output",), writes=("train_data",))
    def offpolicy_data_fetcher(ctx: Any) -> Iterator[None]:
        if len(buffer) < start or getattr(ctx, "learning_held", False):
            return
        count_drawn(ctx, batch_size)
        told = ctx.train_iter if tell_train_iter else None
        ctx.train_data, index = draw(buffer, batch_size, train_iter=told)
        yield
        outputs = ctx.train_output or []
        for output in outputs if isinstance(outputs, list) else [outputs]:
            give_back(buffer, index, output)

    return offpolicy_data_fetcher


class _OfflineDataFetcher:
    """Reads minibatches of a data set; see :func:`offline_data_fetcher`."""

    __name__ = "offline_data_fetcher"
    roles = (Role.LEARNER,)
    reads = ("train_epoch", "trained_env_step")
    writes = ("train_data", "train_epoch", "trained_env_step")

    def __init__(self, dataset: OfflineDataset, *, batch_size: int) -> None:
        self._dataset = dataset
        self._batch_size = batch_size
        self._minibatches = self._make_minibatches(seed=0)

    def setup(self, task: Task[Any]) -> None:
        self._minibatches = self._make_minibatches(seed=task.seed_for("learner", "dataset"))

    def __call__(self, ctx: OfflineRLContext) -> None:
        ctx.train_data = next(self._minibatches)
        ctx.train_epoch = self._minibatches.epoch
        ctx.trained_env_step += self._batch_size

    def state_dict(self) -> dict[str, Any]:
        return self._minibatches.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._minibatches.load_state_dict(state)

    def _make_minibatches(self, *, seed: int) -> Minibatches:
        return self._dataset.batches(self._batch_size, epochs=None, drop_last=True, seed=seed)


def offline_data_fetcher(
    dataset: OfflineDataset, *, batch_size: int
) -> Middleware[OfflineRLContext]:
    """Read the next minibatch of a data set, epoch after epoch, each in a new random order.

    Args:
        dataset: the data set; it stays open, and its owner's to close.
        batch_size: rows in a minibatch; rows that are left over at the end of an epoch are skipped.

    Reads:
        ctx.trained_env_step: counted on.

    Writes:
        ctx.train_data: a batch ``[batch_size, …]``.
        ctx.train_epoch: passes over the data set that are finished with this minibatch.
        ctx.trained_env_step: plus ``batch_size``.

    Raises:
        ValueError: if ``batch_size`` is not positive.
        NotEnoughData: if the data set has fewer rows than a minibatch.
    """
    check_positive(batch_size=batch_size)
    return _OfflineDataFetcher(dataset, batch_size=batch_size)
