"""The coordinator's replay buffers, and the step data that they refer to."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from dmiddleware.classic.replay_buffers import IBuffer, create_buffer
from dmiddleware.worker.comm.store import Store

__all__ = ["ReferenceBuffers", "reference"]


class _Buffer:
    """One buffer of metadata, and the references of its step data by their ids."""

    def __init__(self, cfg: Mapping[str, Any], items: IBuffer) -> None:
        self.cfg = dict(cfg)
        self.items = items
        self.refs: dict[str, str] = {}


class ReferenceBuffers:
    """Replay buffers whose items are metadata: the step data itself is in a store.

    Step data is deleted from the store when it has left its buffer and no learner reads it.

    Args:
        exp_name: folder for the output of the buffers.
        clock: returns the time in seconds.
        delete: deletes references from the store.
    """

    def __init__(
        self,
        exp_name: str,
        *,
        clock: Callable[[], float],
        delete: Callable[[list[str]], None],
    ) -> None:
        self._exp_name = exp_name
        self._clock = clock
        self._delete = delete
        self._buffers: dict[str, _Buffer] = {}

    def __contains__(self, buffer_id: object) -> bool:
        return buffer_id in self._buffers

    def __iter__(self) -> Iterator[str]:
        return iter(self._buffers)

    def open(self, buffer_id: str, cfg: Mapping[str, Any]) -> None:
        """Create a buffer.

        Raises:
            ConfigError: for an unusable config.
        """
        tracked = {**cfg, "enable_track_used_data": True}
        items = create_buffer(tracked, None, self._exp_name, buffer_id, clock=self._clock)
        items.start()
        self._buffers[buffer_id] = _Buffer(cfg, items)

    def close(self, buffer_id: str) -> None:
        """Close a buffer, and delete its step data."""
        buffer = self._buffers.pop(buffer_id)
        buffer.items.close()
        self._delete(list(buffer.refs.values()))

    def push(self, buffer_id: str, data_id: str, data: Mapping[str, Any]) -> bool:
        """Push metadata; if the buffer refuses it, delete its step data.

        Returns:
            Whether the buffer has accepted it.
        """
        buffer = self._buffers[buffer_id]
        is_accepted = buffer.items.push({**data, "data_id": data_id}, -1)
        if is_accepted:
            buffer.refs[data_id] = reference(data, data_id)
        else:
            self._delete([reference(data, data_id)])
        self._delete_used(buffer)
        return is_accepted

    def discard(self, buffer_id: str, data_id: str, data: Mapping[str, Any]) -> None:
        """Delete step data, unless the buffer refers to it."""
        buffer = self._buffers.get(buffer_id)
        if buffer is None or data_id not in buffer.refs:
            self._delete([reference(data, data_id)])

    def sample(self, buffer_id: str, batch_size: int, cur_learner_iter: int) -> list[Any] | None:
        """Draw metadata, which is leased until :meth:`release`; None if there is too little."""
        buffer = self._buffers[buffer_id]
        drawn: list[Any] | None = buffer.items.sample(batch_size, cur_learner_iter)
        self._delete_used(buffer)
        return drawn

    def update(self, buffer_id: str, info: Mapping[str, Any]) -> None:
        """Update priorities."""
        self._buffers[buffer_id].items.update(info)

    def release(self, buffer_id: str, data_ids: Iterable[str]) -> None:
        """End leases."""
        buffer = self._buffers[buffer_id]
        buffer.items.release(data_ids)
        self._delete_used(buffer)

    def remove(self, buffer_id: str, data_ids: Iterable[str]) -> int:
        """Remove metadata whose step data is lost; return how many items were removed."""
        buffer = self._buffers[buffer_id]
        n_removed = buffer.items.remove(data_ids)
        self._delete_used(buffer)
        return n_removed

    def remove_missing(self, store: Store) -> int:
        """Remove metadata whose step data the store does not have; return how many items."""
        n_removed = 0
        for buffer_id, buffer in self._buffers.items():
            missing = store.missing(buffer.refs.values())
            lost = [data_id for data_id, ref in buffer.refs.items() if ref in missing]
            n_removed += self.remove(buffer_id, lost)
        return n_removed

    def state_dict(self) -> dict[str, Any]:
        """Return the content of all buffers, by buffer id."""
        return {
            buffer_id: {
                "cfg": buffer.cfg,
                "items": buffer.items.state_dict(),
                "refs": dict(buffer.refs),
            }
            for buffer_id, buffer in self._buffers.items()
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Open the buffers that :meth:`state_dict` returned."""
        for buffer_id, saved in state.items():
            self.open(buffer_id, saved["cfg"])
            self._buffers[buffer_id].items.load_state_dict(saved["items"])
            self._buffers[buffer_id].refs = dict(saved["refs"])

    def _delete_used(self, buffer: _Buffer) -> None:
        ids = buffer.items.take_deleted()
        self._delete([buffer.refs.pop(data_id) for data_id in ids if data_id in buffer.refs])


def reference(data: Mapping[str, Any], data_id: str) -> str:
    """Return the reference of step data: ``object_ref`` of its metadata, or else its id."""
    return str(data.get("object_ref", data_id))
