"""The seam below the router: ordered streams of bytes.

A transport connects two processes and moves bytes between them, in order, until the connection
ends. Frames, identity, keys, limits and acknowledgments are above it, in code that every transport
shares.

::

    transport.dial(address)                   →  Stream
    transport.listen(address, on_connection)  →  Listener
    stream.send(pieces, on_sent)
    stream.receive(targets, on_bytes)
    stream.close(), listener.close(), transport.close(timeout_s)

The callbacks of all streams and listeners of a transport run on one thread, one at a time. They
must return soon and never wait. They may call any method of the seam. If one raises, the error is
logged and its stream is closed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

from dmiddleware.errors import RouterError

__all__ = [
    "Listener",
    "encrypts",
    "exposes_bytes",
    "OnBytes",
    "OnConnection",
    "OnSent",
    "Piece",
    "Stream",
    "Transport",
]

Piece: TypeAlias = bytes | bytearray | memoryview

OnBytes: TypeAlias = Callable[[int | RouterError], None]
"""Called once for each :meth:`Stream.receive`: with how many bytes have arrived, at least one, or
with the reason why no more will arrive."""

OnSent: TypeAlias = Callable[[RouterError | None], None]
"""Called when all pieces have been sent, or with the reason why they cannot be."""


class Stream(Protocol):
    """One connection, for either side of it.

    A stream sends one list of pieces at a time, and receives into one list of targets at a time.
    Each of the two may be started by any thread. After the connection has ended they fail, but the
    stream still has to be closed.
    """

    def send(self, pieces: Sequence[Piece], on_sent: OnSent) -> bool:
        """Send bytes; call this again only after they have been sent.

        Args:
            pieces: the bytes, in order; they must not change until they have been sent.
            on_sent: called when they have been sent, unless this method returns True.

        Returns:
            Whether the system has already accepted all of them. This is not a sign that the peer
            has received any.
        """
        ...

    def receive(self, targets: Sequence[memoryview], on_bytes: OnBytes) -> None:
        """Receive the next bytes; call this again only after ``on_bytes`` was called.

        Args:
            targets: one or two buffers, which are filled in order, often only in part.
            on_bytes: called when some bytes have arrived, and never by this method itself.
        """
        ...

    def close(self) -> None:
        """Close the connection, without waiting; may be called twice.

        Pending operations fail, and their callbacks are called.
        """
        ...


OnConnection: TypeAlias = Callable[[Stream], float | None]
"""Takes a connection that was accepted. The next one is accepted after it has returned, so it can
make room by closing others first; it may return how many seconds that has to wait."""


class Listener(Protocol):
    """An address that a transport listens on."""

    @property
    def address(self) -> str:
        """Where others can dial; port 0 is replaced by the real one."""
        ...

    def close(self) -> None:
        """Stop listening; accepted connections stay open. May be called twice.

        One more connection may be passed on if it is being accepted at this moment.
        """
        ...


class Transport(Protocol):
    """Connects processes."""

    def dial(self, address: str, *, timeout_s: float) -> Stream:
        """Connect to an address, without waiting.

        Operations that start before the connection is made wait for it, and fail if that takes too
        long.

        Raises:
            TransportError: if the address is not valid.
            RouterStateError: if the process was forked.
        """
        ...

    def listen(self, address: str, on_connection: OnConnection) -> Listener:
        """Listen on an address.

        Raises:
            TransportError: if the transport cannot listen there.
            RouterStateError: if the process was forked.
        """
        ...

    def close(self, *, timeout_s: float) -> bool:
        """Close all connections and listeners, and wait until their callbacks have come.

        A callback does not wait, since it runs on the thread that closes them.

        Args:
            timeout_s: how long to wait, in seconds.

        Returns:
            Whether the thread has ended.
        """
        ...


def exposes_bytes(address: str) -> bool:
    """Return whether others on the network can change what is sent over an address."""
    return address.startswith("tcp://")


def encrypts(address: str) -> bool:
    """Return whether a connection starts with a TLS handshake."""
    return address.startswith("tls+tcp://")
