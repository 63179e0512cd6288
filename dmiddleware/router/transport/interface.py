"""The interface of a transport, which carries requests and replies, whatever their content."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from dmiddleware.errors import TransportError
from dmiddleware.router.wire.byte_pieces import WireBytes

__all__ = [
    "Channel",
    "ListenLimits",
    "Listener",
    "OnReply",
    "Reply",
    "RequestHandler",
    "Transport",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ListenLimits:
    """What connections to a listener may cost it.

    A connection is untrusted until :meth:`Listener.trust` is called for it.

    Attributes:
        max_frame_bytes: a longer request closes its connection without being read.
        max_untrusted_frame_bytes: the same for an untrusted connection.
        handshake_s: how long a connection may stay untrusted before it is closed.
        max_untrusted_requests: an untrusted connection with more requests is not read any further,
            or closed.
        max_untrusted: if more untrusted connections are open, the oldest is closed.
    """

    max_frame_bytes: int
    max_untrusted_frame_bytes: int
    max_untrusted_requests: int = 8
    handshake_s: float = 2.0
    max_untrusted: int = 128


class Reply(Protocol):
    """Replies to one request, now or later, from any thread; only the first call counts."""

    def __call__(self, raw: WireBytes | None, *, urgent: bool = False) -> None:
        """Send the reply.

        It never blocks and never raises: a reply to a closed connection is dropped.

        Args:
            raw: the reply; its bytes must not change until it is sent. None closes the connection
                without a reply.
            urgent: whether it overtakes replies that are waiting to be sent.
        """
        ...


OnReply: TypeAlias = Callable[[memoryview | TransportError], None]
"""Called once with the reply to a request, or the error, on one of the channel's threads.

The channel may not deliver its next reply until this call returns.
"""


class RequestHandler(Protocol):
    """Handles one request; called by several threads at a time."""

    def __call__(self, raw: memoryview, connection: int, reply: Reply) -> None:
        """Handle a request and make sure that it gets a reply.

        Args:
            raw: the request. Its memory is writable, and valid as long as a view of it is alive.
            connection: number of the connection that it arrived on.
            reply: sends the reply; may be called here or later.
        """
        ...


class Listener(Protocol):
    """An address that a transport listens on."""

    @property
    def address(self) -> str:
        """Where others can dial; port 0 is replaced by the real one."""
        ...

    def trust(self, connection: int) -> None:
        """Lift the limits of a connection whose peer has authenticated.

        Without effect if the connection is closed or already trusted.
        """
        ...

    def n_bytes(self, connection: int) -> int:
        """Return how many bytes have moved over a connection, as signs of life of its peer.

        These are received bytes, and those sent after the peer had made room for them. Zero if the
        connection is closed, or the transport cannot say.
        """
        return 0

    def close(self) -> None:
        """Stop listening; requests without a reply get none. May be called twice."""
        ...


class Channel(Protocol):
    """A connection to an address, with any number of pending requests."""

    @property
    def n_bytes(self) -> int:
        """The same for this connection as :meth:`Listener.n_bytes`."""
        return 0

    def request(self, raw: WireBytes) -> memoryview:
        """Make an urgent request and wait for the reply; called by several threads at a time.

        Raises:
            TransportError: if no reply arrived by the channel's deadline, or the connection
                broke.
        """
        ...

    def send(
        self,
        raw: WireBytes,
        on_reply: OnReply,
        *,
        timeout_s: float | None,
        urgent: bool = False,
    ) -> None:
        """Make a request without waiting; called by several threads at a time.

        Args:
            raw: the request; its bytes must not change until ``on_reply`` is called.
            on_reply: called with the outcome, even if the channel is already closed.
            timeout_s: how long to wait for the reply; None: until the connection breaks. A
                transport that may lose a request on an intact connection sets a deadline of its
                own.
            urgent: whether the request overtakes those that are waiting to be sent.
        """
        ...

    def close(self) -> None:
        """Close the connection; pending requests fail at once. May be called twice."""
        ...


class Transport(Protocol):
    """Creates listeners and channels."""

    def listen(
        self,
        address: str,
        serve: RequestHandler,
        *,
        on_disconnect: Callable[[int], None],
        limits: ListenLimits,
    ) -> Listener:
        """Listen on an address.

        Args:
            address: the address.
            serve: handles requests; if it raises, the connection of the request is closed.
            on_disconnect: called with the number of a connection that broke. It must return at
                once and call nothing of the transport.
            limits: what connections may cost.

        Raises:
            TransportError: if the transport cannot listen on the address.
        """
        ...

    def dial(
        self,
        address: str,
        *,
        connect_timeout_s: float,
        reply_timeout_s: float,
        max_frame_bytes: int,
    ) -> Channel:
        """Connect to an address.

        Args:
            address: the address.
            connect_timeout_s: how long to wait for the connection.
            reply_timeout_s: how long :meth:`Channel.request` waits for the reply.
            max_frame_bytes: a longer reply closes the connection without being read.

        Raises:
            TransportError: if the address cannot be reached.
        """
        ...

    def covers_body(self, address: str) -> bool:
        """Return whether frames to and from the address need a MAC over all their bytes."""
        ...

    def stage_arrays(self, arrays: Sequence[memoryview]) -> list[memoryview] | None:
        """Copy the arrays of an event to memory from which they are sent without another copy.

        Args:
            arrays: the arrays' bytes.

        Returns:
            The copies; None if there is no such memory, or the arrays are too small for it.
        """
        ...
