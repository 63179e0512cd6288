"""Push, sample and update priorities, for either kind of replay buffer."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

import numpy as np
import torch

from dmiddleware.data import (
    Batch,
    DequeBuffer,
    PrioritySampler,
    TensorBuffer,
    as_tree,
    flatten_lead,
    index_rows,
    to_dict,
)
from dmiddleware.errors import ConfigError, NotEnoughData
from dmiddleware.pipeline import ChainView, Context
from dmiddleware.policy import LearnMode, priorities_of_rows
from dmiddleware.rl import Counters, Schedule
from middleware.support.checks import policy_setting
from middleware.support.counters import RunCounters

__all__ = [
    "ReplayBuffer",
    "RowIndex",
    "Samples",
    "check_buffer",
    "check_start",
    "count_drawn",
    "counters_for",
    "draw",
    "draw_ahead",
    "n_step_problems",
    "note_progress",
    "bind_to_policy",
    "update_priorities",
    "SkippedDraws",
    "push_item",
    "push_rows",
    "rows_per_draw",
]

_log = logging.getLogger(__name__)

ReplayBuffer: TypeAlias = TensorBuffer | DequeBuffer
"""A buffer that stores rows in columns, or one that stores Python objects."""

Samples: TypeAlias = Batch | list[dict[str, Any]]
"""Data to learn from, in the form that its buffer gives."""

RowIndex: TypeAlias = torch.Tensor | list[int]
"""Where a buffer keeps the rows of a draw."""


def check_buffer(buffer: object) -> None:
    """Reject anything but a buffer.

    Raises:
        ConfigError: with the value.
    """
    if not isinstance(buffer, TensorBuffer | DequeBuffer):
        raise ConfigError(
            f"the buffer must be a TensorBuffer or a DequeBuffer, got {buffer!r:.100}"
        )


def check_start(buffer: ReplayBuffer, *, batch_size: int, learn_start: int | None) -> int:
    """Return the number of rows that the buffer must hold before the first batch is drawn.

    Raises:
        ValueError: if it is less than a batch or more than the buffer's size.
    """
    start = batch_size if learn_start is None else learn_start
    if start < batch_size:
        raise ValueError(f"learn_start must be at least batch_size ({batch_size}), got {start}")
    if start > buffer.size:
        name = "batch_size" if learn_start is None else "learn_start"
        raise ValueError(
            f"{name} must be at most the buffer's size ({buffer.size}), or learning never "
            f"starts; got {start}"
        )
    return start


def push_rows(buffer: ReplayBuffer, batch: Batch, *, train_iter: int) -> None:
    """Push the rows of a batch; a column ``priority`` sets their priorities and is not stored.

    A :class:`DequeBuffer` gets each row as a dictionary, with ``train_iter`` in its metadata.
    """
    priority = batch.get("priority")
    rows = batch
    if priority is not None:
        rows = as_tree({key: column for key, column in batch.items() if key != "priority"})
    if isinstance(buffer, DequeBuffer):
        if rows["done"].dim() == 2:
            rows = flatten_lead(rows, 2)
        for number in range(rows["done"].shape[0]):
            meta = {} if priority is None else {"priority": float(priority.flatten()[number])}
            push_item(buffer, to_dict(index_rows(rows, number)), train_iter=train_iter, **meta)
        return
    index = buffer.push(rows)
    if priority is not None:
        # Of more rows than fit, only the newest were stored.
        buffer.update_priority(np.asarray(index), priority.flatten()[-len(index) :])


def push_item(buffer: DequeBuffer, item: Any, *, train_iter: int, **meta: Any) -> None:
    """Push one object, with the iteration of the policy that collected it in its metadata."""
    buffer.push(item, meta={"train_iter_data_collected": train_iter, **meta})


def counters_for(buffer: ReplayBuffer, schedules: Mapping[str, Schedule]) -> RunCounters:
    """Return the counters that schedules, and those of a buffer's sampler, read from a context."""
    sampler = _prioritised(buffer)
    own = {} if sampler is None else sampler.schedules
    return RunCounters({**schedules, **{f"{name} of the buffer": own[name] for name in own}})


def note_progress(buffer: ReplayBuffer, counters: Counters) -> None:
    """Pass the progress of the run to a sampler that may depend on it."""
    sampler = _prioritised(buffer)
    if sampler is not None:
        sampler.progress = counters.progress


def _prioritised(buffer: ReplayBuffer) -> PrioritySampler | None:
    if isinstance(buffer, TensorBuffer) and isinstance(buffer.sampler, PrioritySampler):
        return buffer.sampler
    return None


def draw(
    buffer: ReplayBuffer, n: int, *, train_iter: int | None = None
) -> tuple[Samples, RowIndex]:
    """Draw data to learn from.

    Args:
        buffer: the buffer to sample.
        n: number of rows.
        train_iter: the learner's iteration, for buffers that limit staleness; None: leave it out.

    Returns:
        A batch ``[n, …]`` or a list of dictionaries, as a policy's learn mode takes it, and the
        indices for :func:`update_priorities`.

    Raises:
        NotEnoughData: if fewer than ``n`` rows may be drawn.
    """
    options: dict[str, Any] = {} if train_iter is None else {"train_iter_sample_data": train_iter}
    if isinstance(buffer, TensorBuffer):
        batch = buffer.sample(n, **options)
        return batch, batch["index"]
    items = buffer.sample(n, **options)
    samples = [
        {**item.data, "weight": float(item.meta["priority_IS"])}
        if "priority_IS" in item.meta
        else item.data
        for item in items
    ]
    return samples, [item.index for item in items]


def draw_ahead(
    buffer: ReplayBuffer, n: int, *, at_most: int, train_iter: int | None = None
) -> list[tuple[Samples, RowIndex]]:
    """Draw data for one or several updates in a row, with one copy where the buffer allows it.

    Args:
        buffer: the buffer to sample.
        n: number of rows for each update.
        at_most: the most updates to draw for.
        train_iter: as for :func:`draw`.

    Returns:
        One to ``at_most`` results of :func:`draw`.

    Raises:
        NotEnoughData: if fewer than ``n`` rows may be drawn.
    """
    if isinstance(buffer, TensorBuffer) and train_iter is None:
        return [(batch, batch["index"]) for batch in buffer.sample_ahead(n, at_most=at_most)]
    return [draw(buffer, n, train_iter=train_iter)]


def update_priorities(buffer: ReplayBuffer, index: RowIndex, outputs: list[dict[str, Any]]) -> None:
    """Write the priorities that one forward returned, if any, to the rows that they are for.

    The key ``priority`` is removed from the outputs.

    Raises:
        ConfigError: if the buffer draws by priority, but the policy returns no priorities, and
            nothing else has set any.
    """
    found = priorities_of_rows(outputs, len(index))
    for output in outputs:
        output.pop("priority", None)
    if found is None:
        if buffer.lacks_priorities:
            raise ConfigError(
                "the buffer draws by priority, but the policy returned no priorities, and nothing "
                "else has set any, so all draws would be uniform; draw uniformly (a TensorBuffer "
                "without PrioritySampler, a DequeBuffer without PriorityExperienceReplay), use a "
                "policy that returns 'priority', or set priorities with buffer.update_priority"
            )
        return
    rows, priority = found
    if isinstance(buffer, TensorBuffer):
        assert isinstance(index, torch.Tensor)
        buffer.update_priority(index if rows is None else index[rows], priority)
        return
    assert isinstance(index, list)
    chosen = index if rows is None else [index[row] for row in rows.tolist()]
    for one, value in zip(chosen, torch.as_tensor(priority).tolist(), strict=True):
        buffer.update(one, meta={"priority": value})


def bind_to_policy(buffer: object, mode: LearnMode) -> None:
    """Make a buffer that computes n-step returns use the policy's discount.

    Raises:
        ConfigError: if the buffer was built with another discount, n-step length or burn-in.
    """
    burn_in = policy_setting(mode, "burn_in")
    if isinstance(buffer, TensorBuffer) and burn_in not in (None, buffer.burn_in):
        raise ConfigError(
            f"the buffer has burn_in={buffer.burn_in}, but the policy has burn_in={burn_in}; build "
            "it with TensorBuffer(size, burn_in=policy.burn_in, ...)"
        )
    discount = mode.spec.discount
    if isinstance(buffer, TensorBuffer) and buffer.n_step > 1 and discount is not None:
        buffer.bind(n_step=mode.spec.n_step, discount=discount)


def n_step_problems(buffer: object, mode: LearnMode, chain: ChainView) -> Iterator[str]:
    """Yield the problem of a policy for n-step returns that gets one-step transitions.

    Args:
        buffer: from where the rows are drawn; None: no buffer of the chain.
        mode: the policy's learn mode.
        chain: the chain; middleware with the attribute ``computes_n_step`` provide such returns.
    """
    n_step = mode.spec.n_step
    if n_step == 1 or any(hasattr(one, "computes_n_step") for one in chain.middleware):
        return
    if buffer is None:
        yield (
            f"the policy has nstep={n_step}, but nothing in the chain computes n-step returns; "
            "push the rows to a TensorBuffer(size, n_step=policy.nstep) and learn with "
            "OffPolicyLearner, or build the policy with nstep=1 (a middleware that draws from a "
            "buffer of its own declares it with draws_from)"
        )
    elif isinstance(buffer, TensorBuffer) and buffer.n_step != n_step:
        yield (
            f"the policy has nstep={n_step}, but the buffer has n_step={buffer.n_step}; build it "
            "with TensorBuffer(size, n_step=policy.nstep)"
        )


def rows_per_draw(buffer: ReplayBuffer) -> int:
    """Return how many rows one drawn item has to learn from: those of a sequence, or one."""
    length = buffer.unroll_len if isinstance(buffer, TensorBuffer) else None
    return length or 1


def count_drawn(ctx: Context, n_rows: int) -> None:
    """Add to ``ctx.trained_env_step``, if the context has that field."""
    counted = getattr(ctx, "trained_env_step", None)
    if counted is not None:
        ctx.trained_env_step = counted + n_rows  # type: ignore[attr-defined]


class SkippedDraws:
    """Counts the draws for which a buffer had too few rows, and warns at 1, 2, 4, 8, … of them."""

    def __init__(self) -> None:
        self.count = 0

    def add(self, ctx: Context, error: NotEnoughData) -> None:
        """Count one; the total is logged as ``learn/skipped_draws``."""
        self.count += 1
        ctx.log("learn/skipped_draws", self.count)
        if self.count & (self.count - 1) == 0:
            _log.warning("skipped %d update(s) so far, because %s", self.count, error)
