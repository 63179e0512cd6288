"""IBuffer: the base of the classic replay buffers."""

from __future__ import annotations

import copy
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch.distributed as dist

from dmiddleware.classic.buffer_middleware import clone_object
from dmiddleware.classic.config import Configurable, Option, count, optional, switch, whole
from dmiddleware.classic.deque_buffer import DequeBuffer
from dmiddleware.classic.keywords import also_named
from dmiddleware.classic.logs import LOG_TO_FILE, LazyWriter, TextLog, log_folder, table
from dmiddleware.classic.replay_buffers.tracked_data import TrackedData, data_id_of
from dmiddleware.data.buffer_state import check_state
from dmiddleware.errors import ConfigError, NotEnoughData
from dmiddleware.process.closing import Closing

__all__ = ["IBuffer"]

_BETWEEN_WARNINGS_S = 60.0
_PERIOD_S = 60.0


class IBuffer(Closing, Configurable, ABC):
    """Base class of the classic replay buffers: a :class:`DequeBuffer` and logs.

    Methods hold a lock, so several threads may share a buffer. The buffer starts no thread: the
    first push or sample after each period logs how many items came and went.

    With ``enable_track_used_data`` the items are references to stored step data, dictionaries with
    a ``data_id``. A sample leases its items until :meth:`release`, and :meth:`take_deleted` returns
    what may be deleted from the store.

    Args:
        cfg: what differs from ``default_config()``.
        tb_logger: a tensorboardX ``SummaryWriter``; None creates one in ``<exp_name>/log`` on first
            use.
        exp_name: folder for the buffer's output.
        instance_name: distinguishes buffers in logs.
        clock: returns the time in seconds; for logs and rate control.

    Raises:
        ConfigError: for an unusable config, or an argument of the wrong type.
    """

    config: ClassVar[dict[str, Any]] = {
        "replay_buffer_size": Option(10_000, count, "capacity in items"),
        "deepcopy": Option(False, switch, "whether to copy items on push and on sample"),
        "enable_track_used_data": Option(
            False, switch, "whether items refer to stored step data, by their `data_id`"
        ),
        "seed": Option(
            None,
            optional(whole),
            "seed of the buffer's random generator; None takes one from the system",
        ),
        "log_to_file": LOG_TO_FILE,
    }

    def __init__(
        self,
        cfg: Mapping[str, Any] | None = None,
        tb_logger: Any = None,
        exp_name: str = "default_experiment",
        instance_name: str = "buffer",
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cfg = self.merged_config(cfg)
        if not callable(clock):
            raise ConfigError(f"clock must be a function that returns seconds, got {clock!r:.100}")
        self._lock = threading.RLock()
        self._clock = clock
        self._instance_name = instance_name
        self._items = DequeBuffer(int(self._cfg.replay_buffer_size), seed=self._cfg.seed)
        if self._cfg.deepcopy:
            self._items.use(clone_object())
        self._tracked: TrackedData | None = None
        if self._cfg.enable_track_used_data:
            self._tracked = TrackedData(self._items)
            self._items.use(self._tracked)
        self._push_count = 0
        is_one_of_several = dist.is_available() and dist.is_initialized()
        self._is_first_rank = not is_one_of_several or dist.get_rank() == 0
        self._logger = TextLog.of_worker(
            type(self).__module__,
            exp_name,
            instance_name,
            to_file=self._cfg.log_to_file and self._is_first_rank,
        )
        self._writer = LazyWriter(tb_logger, log_folder(exp_name, instance_name))
        self._warned_at: dict[str, float] = {}
        self._began_at = self._period_began_at = clock()
        self._in_period = {"pushed_in": 0, "sampled_out": 0}
        self._held_before = 0

    @property
    def replay_buffer_size(self) -> int:
        """Capacity in items."""
        return self._items.size

    @property
    def push_count(self) -> int:
        """Number of items pushed since the buffer was created or cleared."""
        return self._push_count

    @property
    def _period_s(self) -> float:
        """Seconds between two logs of how many items came and went."""
        return _PERIOD_S

    def start(self) -> None:
        """Do nothing: the buffer has no thread to start."""

    def close(self) -> None:
        """Remove all items and end all leases; may be called twice.

        The ids of all step data that is left are then in :meth:`take_deleted`.
        """
        with self._lock:
            self.clear()
            if self._tracked is not None:
                self._tracked.release_all()
            self._writer.close()

    def push(self, data: Any, cur_collector_envstep: int) -> bool:
        """Append items; a full buffer drops its oldest ones.

        Args:
            data: a list of items, or anything else as one item.
            cur_collector_envstep: env steps collected so far, for logs.

        Returns:
            Whether the buffer accepted the data.

        Raises:
            TypeError: for items that this buffer cannot hold; nothing is stored.
        """
        items = data if isinstance(data, list) else [data]
        with self._lock:
            self._log_throughput()
            if self._tracked is not None:
                for item in items:
                    data_id_of(item)
            return self._push(items, cur_collector_envstep)

    @abstractmethod
    def sample(self, *args: Any, **kwargs: Any) -> Any:
        """Draw items; None, logged once a minute, if there is too little data."""

    def update(self, info: Any) -> None:
        """Take what the learner reports about sampled items; most buffers need nothing of it."""

    def clear(self) -> None:
        """Remove all items."""
        with self._lock:
            self._items.clear()
            self._push_count = 0

    def count(self) -> int:
        """Return the number of items held."""
        with self._lock:
            return self._items.count()

    def release(self, data_ids: Iterable[str]) -> None:
        """End the leases of sampled items, one for each id; ids without a lease are skipped."""
        with self._lock:
            if self._tracked is not None:
                self._tracked.release(data_ids)

    def remove(self, data_ids: Iterable[str]) -> int:
        """Remove the items with these ids, whose step data is lost.

        Returns:
            The number of items removed.
        """
        with self._lock:
            if self._tracked is None:
                return 0
            return self._items.delete(self._tracked.indices_of(data_ids))

    def take_deleted(self) -> list[str]:
        """Return the ids of items that have left the buffer and are not leased, each once."""
        with self._lock:
            return [] if self._tracked is None else self._tracked.take_deleted()

    @also_named(file_name="file")
    def save_data(self, file: str | Path, *, allow_pickle: bool = False) -> None:
        """Write the items to a file atomically, as :meth:`DequeBuffer.save_data` does.

        Args:
            file: the file; its folder is created if needed. As a keyword also ``file_name``.
            allow_pickle: whether to pickle objects that a checkpoint cannot hold.

        Raises:
            TypeError: if there is such an object and ``allow_pickle`` is False.
            CheckpointWriteError: if the file cannot be written.
        """
        with self._lock:
            self._items.save_data(file, allow_pickle=allow_pickle)

    @also_named(file_name="file")
    def load_data(self, file: str | Path, *, allow_pickle: bool = False) -> None:
        """Replace the items with those that :meth:`save_data` wrote; only the newest that fit.

        Args:
            file: the file. As a keyword also ``file_name``.
            allow_pickle: whether to load pickled objects, which can run any code.

        Raises:
            ValueError: if the file holds pickled objects and ``allow_pickle`` is False.
            FileNotFoundError: if the file does not exist.
            CheckpointDamaged: if the file is incomplete.
        """
        with self._lock:
            self._items.load_data(file, allow_pickle=allow_pickle)
            self._push_count = self._items.count()

    def state_dict(self) -> dict[str, Any]:
        """Return items, counters and random generator; ``save_checkpoint`` can write it."""
        with self._lock:
            return {"items": self._items.state_dict(), "push_count": self._push_count}

    @also_named(_state_dict="state")
    def load_state_dict(self, state: Mapping[str, Any], deepcopy: bool = False) -> None:
        """Restore what :meth:`state_dict` returned; later samples are those of its buffer.

        Args:
            state: the state. As a keyword also ``_state_dict``.
            deepcopy: whether to copy the items, instead of sharing them with ``state``.

        Raises:
            CheckpointMismatch: if the state comes from a buffer of another size or with other
                options.
        """
        with self._lock:
            check_state(type(self).__name__, state, self.state_dict().keys())
            self._load_state(copy.deepcopy(state) if deepcopy else state)
            self._held_before = self._items.count()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._instance_name!r}, {self.count()} items)"

    def _load_state(self, state: Mapping[str, Any]) -> None:
        self._items.load_state_dict(state["items"])
        self._push_count = state["push_count"]

    def _push(self, items: list[Any], envstep: int) -> bool:
        self._items.import_data((item, None) for item in items)
        self._pushed(len(items))
        return True

    def _pushed(self, n: int) -> None:
        self._push_count += n
        self._in_period["pushed_in"] += n

    def _draw(self, size: int, draw: Callable[[], list[Any]]) -> list[Any] | None:
        """Return what ``draw`` returns, or None if there is too little data for it."""
        with self._lock:
            self._log_throughput()
            if not size:
                return []
            try:
                drawn = draw()
            except NotEnoughData as error:
                self._warn("sample", str(error))
                return None
            self._in_period["sampled_out"] += size
            return drawn

    def _warn(self, kind: str, message: str) -> None:
        """Log a warning, at most one of a kind in a minute."""
        now = self._clock()
        if now - self._warned_at.get(kind, float("-inf")) >= _BETWEEN_WARNINGS_S:
            self._warned_at[kind] = now
            self._logger.warning("%s: %s", self._instance_name, message)

    def _log_throughput(self) -> None:
        now = self._clock()
        if now - self._period_began_at < self._period_s:
            return
        held = self._items.count()
        removed = self._held_before + self._in_period["pushed_in"] - held
        values = {**self._in_period, "removed": removed, "current_have": held}
        self._show(
            f"last {now - self._period_began_at:.0f} s", values, {"sec": now - self._began_at}
        )
        self._period_began_at, self._held_before = now, held
        self._in_period = dict.fromkeys(self._in_period, 0)

    def _show(self, title: str, values: Mapping[str, float], at: Mapping[str, float]) -> None:
        """Write values to the text log and to TensorBoard, on rank 0.

        Args:
            title: what the values describe.
            values: by name.
            at: for each axis in TensorBoard, the position on it.
        """
        if not self._is_first_rank:
            return
        self._logger.info("%s: %s\n%s", self._instance_name, title, table(values))
        for axis, position in at.items():
            for name, value in values.items():
                self._writer.get().add_scalar(
                    f"{self._instance_name}_{axis}/{name}", value, int(position)
                )
