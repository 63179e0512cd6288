"""A listener for framed connections, and what strangers may cost it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final, TypeAlias

from dmiddleware.errors import RouterError, TransportError
from dmiddleware.router.protocol.strangers import Strangers
from dmiddleware.router.transport.framed_connection import Callbacks, FramedConnection
from dmiddleware.router.transport.stream import Stream, Transport, encrypts

__all__ = ["FramedListener", "OnConnection"]

OnConnection: TypeAlias = Callable[[FramedConnection], Callbacks]
"""Takes a connection that has not started, and returns what it calls."""

_TLS_EXTRA: Final = 2
"""A TLS handshake costs the processor time of this many connections without one, about 1.7 ms."""


class FramedListener:
    """Accepts connections. Their peers are strangers until :meth:`trust` is called.

    A stranger may send short frames for a few seconds, and its connection may be closed to make
    room for another one. The more they cost, the fewer are accepted in a second.

    Args:
        transport: listens.
        address: where.
        on_connection: called once for each connection.
        now: returns monotonic seconds.
        max_stranger_bytes: the longest frame of a stranger.
        max_frame_bytes: the longest frame of others.
        strangers: decides which of them are closed.

    Raises:
        TransportError: if the transport cannot listen on the address.
    """

    def __init__(
        self,
        transport: Transport,
        address: str,
        *,
        on_connection: OnConnection,
        now: Callable[[], float],
        max_stranger_bytes: int,
        max_frame_bytes: int,
        strangers: Strangers[FramedConnection] | None = None,
    ) -> None:
        self._on_connection = on_connection
        self._now = now
        self._max_stranger_bytes = max_stranger_bytes
        self._max_frame_bytes = max_frame_bytes
        if strangers is None:
            strangers = Strangers(extra=_TLS_EXTRA if encrypts(address) else 0)
        self._strangers = strangers
        self._lock = threading.Lock()
        self._connections: set[FramedConnection] = set()
        self._is_closed = False
        self._listener = transport.listen(address, self._on_stream)

    @property
    def address(self) -> str:
        """Where others can dial; port 0 is replaced by the real one."""
        return self._listener.address

    def note_hello(self, connection: FramedConnection) -> None:
        """Note that a connection has sent a valid hello."""
        with self._lock:
            self._strangers.note_hello(connection)

    def trust(self, connection: FramedConnection) -> None:
        """Lift the limits of a connection whose peer has authenticated; called by ``on_frame``."""
        with self._lock:
            self._strangers.trust(connection)
        connection.allow(self._max_frame_bytes)

    def close_late(self) -> None:
        """Close the connections that have not authenticated in time; call this regularly."""
        with self._lock:
            late = self._strangers.take_late(self._now())
        for connection in late:
            connection.close(TransportError("the peer did not authenticate in time"))

    def close(self) -> None:
        """Stop listening and close the connections; may be called twice."""
        with self._lock:
            self._is_closed = True
            connections = list(self._connections)
        self._listener.close()
        for connection in connections:
            connection.close()

    def _on_stream(self, stream: Stream) -> float:
        def on_end(error: RouterError) -> None:
            with self._lock:
                self._connections.discard(connection)
                self._strangers.note_end(connection)
            callbacks.on_end(error)

        connection = FramedConnection(stream, max_frame_bytes=self._max_stranger_bytes)
        callbacks = self._on_connection(connection)
        with self._lock:
            is_closed = self._is_closed
            closed = None if is_closed else self._strangers.add(connection, self._now())
            self._connections.add(connection)
        if closed is not None:
            closed.close(TransportError("too many peers without authentication are connected"))
        connection.start(callbacks._replace(on_end=on_end))
        if is_closed:
            connection.close()
        return self._strangers.pause_s(self._now())
