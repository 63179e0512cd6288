"""DequeReplay: a DequeBuffer as the replay buffer of a chain."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch

from dmiddleware.classic.collate import collate_samples
from dmiddleware.classic.deque_buffer import BufferedData, DequeBuffer
from dmiddleware.errors import ConfigError
from dmiddleware.files.schema import as_index
from dmiddleware.schedule import Counters, Schedule
from dmiddleware.tree import Batch, flatten_lead, index_rows, to_dict

__all__ = ["DequeReplay"]


class DequeReplay:
    """A :class:`DequeBuffer` as the :class:`~dmiddleware.data.ReplayBuffer` of a chain.

    The deque buffer stores each row as a dictionary. Its metadata has the column ``collect_iter``,
    if there is one, as ``train_iter_data_collected``. Sampled items are stacked into a batch, with
    the index of each item as ``index``, and with ``weight`` if :class:`PriorityExperienceReplay`
    computes importance weights::

        buffer = DequeReplay(DequeBuffer(20_000))
        task.use(data_pusher(buffer))
        task.use(OffPolicyLearner(policy, buffer))

    Args:
        buffer: the deque buffer; add buffer middleware to it.
        whole_episodes: store each batch that is pushed as one item. Batches of one length can be
            sampled, ``[n, T, …]``.
        pass_train_iter: pass the iteration of the learner with each sample, as
            ``train_iter_sample_data``, which :class:`staleness_check` needs.

    Raises:
        ConfigError: if ``buffer`` is not a DequeBuffer.
    """

    n_step = None
    """Unknown: rows are sampled as they were pushed, and rewards may have been summed before."""
    unroll_len = None
    """Rows are sampled one by one."""

    def __init__(
        self, buffer: DequeBuffer, *, whole_episodes: bool = False, pass_train_iter: bool = False
    ) -> None:
        if not isinstance(buffer, DequeBuffer):
            raise ConfigError(f"DequeReplay takes a DequeBuffer, got {buffer!r:.100}")
        self.buffer = buffer
        self._whole_episodes = whole_episodes
        self.reads_counters = pass_train_iter

    @property
    def size(self) -> int:
        """Capacity in items."""
        return self.buffer.size

    @property
    def settings(self) -> dict[str, Any]:
        """The class and the arguments that are plain values."""
        return self.buffer.settings | {
            "whole_episodes": self._whole_episodes,
            "pass_train_iter": self.reads_counters,
        }

    @property
    def schedules(self) -> dict[str, Schedule]:
        """No settings: buffer middleware counts samples itself."""
        return {}

    @property
    def lacks_priorities(self) -> bool:
        """Whether items are drawn by priority, but no priority was ever set."""
        return self.buffer.lacks_priorities

    def bind(
        self,
        *,
        n_step: int,
        discount: float | None,
        burn_in: int | None,
        start_columns: Collection[str],
    ) -> None:
        """Reject a policy that learns from sequences.

        Raises:
            ConfigError: if ``burn_in`` is not None: this buffer samples single rows.
        """
        if burn_in is not None:
            raise ConfigError(
                f"the policy has burn_in={burn_in} and learns from sequences, but a DequeBuffer "
                "samples single rows; use TensorBuffer(size, unroll_len=...)"
            )

    def __len__(self) -> int:
        return len(self.buffer)

    def push(self, batch: Batch) -> list[int]:
        """Store rows ``[N, …]`` or ``[T, E, …]``, one item each, and return their indices."""
        if self._whole_episodes:
            return [self.buffer.push(batch, meta=_meta(batch))]
        if batch["done"].dim() == 2:
            batch = flatten_lead(batch, 2)
        rows = (index_rows(batch, number) for number in range(len(batch["done"])))
        return [self.buffer.push(to_dict(row), meta=_meta(row)) for row in rows]

    def sample_ahead(
        self, n: int, *, at_most: int, counters: Counters | None = None
    ) -> list[Batch]:
        """Draw one batch ``[n, …]``, because buffer middleware may change what is drawn next.

        Raises:
            NotEnoughData: if fewer than ``n`` items can be drawn.
            StructureError: if the items differ in their keys or shapes.
        """
        options: dict[str, Any] = {}
        if self.reads_counters and counters is not None:
            options["train_iter_sample_data"] = counters.update
        items: list[BufferedData] = self.buffer.sample(n, **options)
        return [collate_samples([_sample(item) for item in items])]

    def update_priority(self, index: Any, priority: Any) -> int:
        """Set ``priority`` in the metadata of items, ``[n]``; those no longer held are skipped."""
        values = torch.as_tensor(priority).tolist()
        pairs = zip(as_index(index).tolist(), values, strict=True)
        return sum([self.buffer.update(one, meta={"priority": value}) for one, value in pairs])

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the deque buffer."""
        return self.buffer.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        self.buffer.load_state_dict(state)


def _meta(rows: Batch) -> dict[str, Any]:
    """Return the iteration of the policy that collected rows, the oldest of several."""
    if "collect_iter" not in rows:
        return {}
    return {"train_iter_data_collected": int(rows["collect_iter"].min())}


def _sample(item: BufferedData) -> dict[str, Any]:
    sample = {**to_dict(item.data), "index": item.index}
    if "priority_IS" in item.meta:
        sample["weight"] = float(item.meta["priority_IS"])
    return sample
