"""DequeReplay: a DequeBuffer as the replay buffer of a chain."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Final

import torch

from dmiddleware.classic.collate import collate_samples
from dmiddleware.classic.deque_buffer import BufferedData, DequeBuffer
from dmiddleware.classic.sequence_windows import SequenceWindows, padded
from dmiddleware.classic.stored_rows import RowColumns, StoredRow
from dmiddleware.errors import ConfigError
from dmiddleware.files.schema import as_index
from dmiddleware.policy.state import entry_of
from dmiddleware.schedule import Counters, Schedule
from dmiddleware.settings import Count, checked
from dmiddleware.tree import Batch, as_tree, flatten_lead, index_rows, items_of, stack, to_dict

__all__ = ["DequeReplay"]

_WINDOWS: Final = "windows"


class DequeReplay:
    """A :class:`DequeBuffer` as the :class:`~dmiddleware.data.ReplayBuffer` of a chain.

    The items of the deque buffer are the rows, each a dictionary when it is read; or the whole
    episodes of a collector; or, with ``unroll_len``, sequences for a policy such as R2D2. The
    metadata has the column ``collect_iter``, if there is one, as ``train_iter_data_collected``.
    Rows of one structure are kept in columns until somebody reads them. Sampled items are stacked
    into a batch, with the index of each item as ``index``, and with ``weight`` if
    :class:`PriorityExperienceReplay` computes importance weights::

        buffer = DequeReplay(DequeBuffer(20_000))
        task.use(data_pusher(buffer))
        task.use(OffPolicyLearner(policy, buffer))

    Args:
        buffer: the deque buffer; add buffer middleware to it.
        whole_episodes: whether to store each batch that is pushed as one item; None: as it comes,
            episodes by :meth:`push_episode` as one item, and the rows of other batches one by one.
            Episodes of one length can be sampled, ``[n, T, …]``.
        unroll_len: rows that a policy learns from in a sequence, which follow its burn-in. Samples
            are ``[L, n, …]`` with ``mask``, as those of a
            :class:`~dmiddleware.data.TensorBuffer` with ``unroll_len``, and the sequences of an
            episode begin every ``unroll_len`` rows. None: no sequences.
        pass_train_iter: pass the iteration of the learner with each sample, as
            ``train_iter_sample_data``, which :class:`staleness_check` needs.

    Raises:
        ConfigError: if ``buffer`` is not a DequeBuffer, or for sequences of whole episodes.
    """

    n_step = None
    """Unknown: rows are sampled as they were pushed, and rewards may have been summed before."""

    def __init__(
        self,
        buffer: DequeBuffer,
        *,
        whole_episodes: bool | None = None,
        unroll_len: int | None = None,
        pass_train_iter: bool = False,
    ) -> None:
        if not isinstance(buffer, DequeBuffer):
            raise ConfigError(f"DequeReplay takes a DequeBuffer, got {buffer!r:.100}")
        self.buffer = buffer
        self._whole_episodes = whole_episodes
        self.unroll_len: int | None = checked("unroll_len", unroll_len, Count | None)
        if whole_episodes and unroll_len is not None:
            raise ConfigError("whole_episodes and unroll_len exclude each other; leave one out")
        self._windows = None if unroll_len is None else SequenceWindows(unroll_len, 0)
        self._start_columns: frozenset[str] = frozenset()
        self.reads_counters = pass_train_iter
        self._columns: RowColumns | None = None

    @property
    def size(self) -> int:
        """Capacity in items."""
        return self.buffer.size

    @property
    def settings(self) -> dict[str, Any]:
        """The class and the arguments that are plain values."""
        return self.buffer.settings | {
            "whole_episodes": self._whole_episodes,
            "unroll_len": self.unroll_len,
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
        """Take the burn-in of a policy that learns from sequences.

        Raises:
            ConfigError: if this buffer has no ``unroll_len``, and so samples single rows, or has
                sequences with another burn-in.
        """
        if burn_in is None:
            return
        if self._windows is None or self.unroll_len is None:
            raise ConfigError(
                f"the policy has burn_in={burn_in} and learns from sequences, but this buffer "
                "samples single rows; use DequeReplay(buffer, unroll_len=...) or "
                "TensorBuffer(size, unroll_len=...)"
            )
        length = burn_in + self.unroll_len
        if len(self.buffer) and length != self._windows.length:
            raise ConfigError(
                f"the buffer holds sequences of {self._windows.length} rows, but the policy needs "
                f"{length}: burn_in={burn_in} and unroll_len={self.unroll_len}; bind it before "
                "the first push"
            )
        if length != self._windows.length:
            self._windows = SequenceWindows(self.unroll_len, burn_in)
        self._start_columns = frozenset(start_columns)

    def __len__(self) -> int:
        return len(self.buffer)

    def push(self, batch: Batch) -> list[int]:
        """Store rows ``[N, …]`` or ``[T, E, …]``, one item each, and return their indices.

        With ``unroll_len`` the items are the sequences that these rows complete.
        """
        if self._windows is not None:
            sequences = self._windows.add(batch)
            return [self.buffer.push(to_dict(rows), meta=_meta(rows)) for rows in sequences]
        if self._whole_episodes:
            return [self.buffer.push(batch, meta=_meta(batch))]
        if batch["done"].dim() == 2:
            batch = flatten_lead(batch, 2)
        if self._columns is None:
            self._columns = RowColumns(self.size, batch)
        if self._columns.fits(batch):
            metas = _metas(batch)
            stored = self._columns.add(batch)
            return [self.buffer.push(*item) for item in zip(stored, metas, strict=True)]
        rows = (index_rows(batch, number) for number in range(len(batch["done"])))
        return [self.buffer.push(to_dict(row), meta=_meta(row)) for row in rows]

    def push_episode(self, episode: Batch) -> list[int]:
        """Store a whole episode ``[T, …]`` as one item, and return its index.

        With ``unroll_len`` or ``whole_episodes=False`` its rows are pushed as others are.
        """
        if self._windows is not None or self._whole_episodes is False:
            return self.push(episode)
        return [self.buffer.push(episode, meta=_meta(episode))]

    def sample_ahead(
        self, n: int, *, at_most: int, counters: Counters | None = None
    ) -> list[Batch]:
        """Draw one batch ``[n, …]``, because buffer middleware may change what is drawn next.

        With ``unroll_len`` it is ``[L, n, …]``, with ``mask``.

        Raises:
            NotEnoughData: if fewer than ``n`` items can be drawn.
            StructureError: if the items differ in their keys or shapes.
        """
        options: dict[str, Any] = {}
        if self.reads_counters and counters is not None:
            options["train_iter_sample_data"] = counters.update
        items = None if options else self.buffer.drawn_to_read(n)
        if items is None:
            items = self.buffer.sample(n, **options)
        if self._windows is not None:
            return [self._sequences(items, self._windows.length)]
        rows = self._gathered(items)
        return [collate_samples([_sample(item) for item in items]) if rows is None else rows]

    def _gathered(self, items: list[BufferedData]) -> Batch | None:
        """Return the rows of items that are all in the columns; None: some are not."""
        slots = []
        for item in items:
            row = item.stored
            if not isinstance(row, StoredRow) or row.columns is not self._columns:
                return None
            slots.append(row.slot)
        if not slots or self._columns is None:
            return None
        columns: dict[str, Any] = dict(items_of(self._columns.gather(slots)))
        return as_tree(columns | _of_items(items))

    def _sequences(self, items: list[BufferedData], length: int) -> Batch:
        """Return sequences ``[length, n, …]``; start columns are those of the first rows."""
        sequences = [as_tree(item.data) for item in items]
        windows, masks = zip(*(padded(rows, length) for rows in sequences), strict=True)
        columns: dict[str, Any] = dict(items_of(stack(windows, dim=1)))
        for name in self._start_columns & columns.keys():
            columns[name] = index_rows(columns[name], 0)
        columns["mask"] = torch.stack(masks, dim=1)
        return as_tree(columns | _of_items(items))

    def update_priority(self, index: Any, priority: Any) -> int:
        """Set ``priority`` in the metadata of items, ``[n]``; those no longer held are skipped."""
        values = torch.as_tensor(priority).tolist()
        pairs = zip(as_index(index).tolist(), values, strict=True)
        return sum([self.buffer.update(one, meta={"priority": value}) for one, value in pairs])

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the deque buffer, and the rows whose sequences continue."""
        state = self.buffer.state_dict()
        return state if self._windows is None else {**state, _WINDOWS: self._windows.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        rest = {name: value for name, value in state.items() if name != _WINDOWS}
        if self._windows is not None:
            self._windows.load_state_dict(entry_of(state, _WINDOWS))
        self.buffer.load_state_dict(rest)


def _of_items(items: list[BufferedData]) -> dict[str, torch.Tensor]:
    """Return the column ``index``, and ``weight`` if there are importance weights."""
    columns = {"index": torch.tensor([item.index for item in items])}
    if all("priority_IS" in item.meta for item in items):
        columns["weight"] = torch.tensor([float(item.meta["priority_IS"]) for item in items])
    return columns


def _metas(rows: Batch) -> list[dict[str, Any]]:
    """Return the metadata of each row ``[N, …]``."""
    if "collect_iter" not in rows:
        return [{} for _ in range(len(rows["done"]))]
    return [{"train_iter_data_collected": update} for update in rows["collect_iter"].tolist()]


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
