"""Shared-memory transports over one folder, and transports that record or remove slabs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dmiddleware.router.transport import (
    Channel,
    Listener,
    OnReply,
    Reply,
    RequestHandler,
    Transport,
)
from dmiddleware.router.transport.nng import NngTransport
from dmiddleware.router.transport.shared_memory import SharedMemoryTransport
from dmiddleware.router.wire.byte_pieces import WireBytes
from tests.dmiddleware.router.endpoints import unlimited
from tests.dmiddleware.router.request_handlers import echo

__all__ = ["MAX_BYTES", "RecordingTransport", "SlabRemovingTransport", "big", "shared", "talking"]

MAX_BYTES = 4 << 20


class RecordingTransport:
    """A transport that records the sizes of its requests and replies."""

    def __init__(self) -> None:
        self._inner = NngTransport()
        self.asked: list[int] = []
        self.replied: list[int] = []

    def listen(self, address: str, serve: Any, **options: Any) -> Listener:
        def serve_and_count(raw: memoryview, connection: int, reply: Reply) -> None:
            def count_and_reply(answer: WireBytes | None, *, urgent: bool = False) -> None:
                self.replied.append(len(answer or b""))
                reply(answer, urgent=urgent)

            serve(raw, connection, count_and_reply)

        return self._inner.listen(address, serve_and_count, **options)

    def dial(self, address: str, **options: Any) -> Channel:
        return RecordingChannel(self._inner.dial(address, **options), self.asked)

    def covers_body(self, address: str) -> bool:
        return self._inner.covers_body(address)


class RecordingChannel(Channel):
    """A channel that records the sizes of its requests."""

    def __init__(self, inner: Channel, asked: list[int]) -> None:
        self._inner = inner
        self._asked = asked
        self.close = inner.close

    def request(self, raw: WireBytes) -> memoryview:
        self._asked.append(len(raw))
        return self._inner.request(raw)

    def send(self, raw: WireBytes, on_reply: OnReply, **options: Any) -> None:
        self._asked.append(len(raw))
        self._inner.send(raw, on_reply, **options)


def shared(folder: Path, inner: Transport | None = None, **options: Any) -> SharedMemoryTransport:
    return SharedMemoryTransport(inner or NngTransport(), directory=folder, **options)


@contextlib.contextmanager
def talking(
    address: str,
    listens: Transport,
    dials: Transport,
    serve: RequestHandler = echo,
) -> Iterator[Channel]:
    listener = listens.listen(
        address, serve, on_disconnect=lambda _: None, limits=unlimited(MAX_BYTES)
    )
    try:
        channel = dials.dial(
            address, connect_timeout_s=20.0, reply_timeout_s=20.0, max_frame_bytes=MAX_BYTES
        )
        try:
            yield channel
        finally:
            channel.close()
            channel.close()
    finally:
        listener.close()
        listener.close()


class SlabRemovingTransport(RecordingTransport):
    """A transport that removes the slab files before and after each request."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder

    def _remove(self) -> None:
        for path in big(self._folder):
            path.unlink()

    def listen(self, address: str, serve: Any, **options: Any) -> Listener:
        def serve_and_remove(raw: memoryview, connection: int, reply: Reply) -> None:
            def remove_and_reply(answer: WireBytes | None, *, urgent: bool = False) -> None:
                self._remove()
                reply(answer, urgent=urgent)

            self._remove()
            serve(raw, connection, remove_and_reply)

        return super().listen(address, serve_and_remove, **options)


def big(folder: Path) -> list[Path]:
    """Return the slabs in a folder."""
    return [path for path in folder.iterdir() if path.stat().st_size > 1000]
