"""What the router needs of a transport."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

from dmiddleware.errors import TransportError
from dmiddleware.router.wire.byte_pieces import Raw

__all__ = ["Channel", "Listener", "OnAnswer", "Reply", "Serve", "Transport"]

Reply: TypeAlias = Callable[[Raw | None], None]
"""Answers one request, now or later, from any thread; only its first call counts.

It does not wait for the other side, and raises nothing: an answer to who is gone is lost. None
closes the connection without an answer.
"""

OnAnswer: TypeAlias = Callable[[memoryview | TransportError], None]
"""Told once what became of a request, on a thread of the channel's.

It gets the answer, or why there is none. The channel's next answer may wait until it returns.
"""


class Serve(Protocol):
    """Takes one request; called by several threads at a time."""

    def __call__(self, raw: memoryview, connection: int, reply: Reply) -> None:
        """Take a request, and see to it that it is answered.

        Args:
            raw: the request; its memory stays valid as long as a view of it is alive, and may be
                written to.
            connection: a number of the connection that it came over.
            reply: answers it; may be called within, or later.
        """
        ...


class Listener(Protocol):
    """An address that is listened on."""

    @property
    def address(self) -> str:
        """Where others can dial; port 0 has become a real one."""
        ...

    def close(self) -> None:
        """Stop listening; requests without an answer get none. Twice is fine."""
        ...


class Channel(Protocol):
    """A connection to an address, with any number of requests under way."""

    def request(self, raw: Raw) -> memoryview:
        """Make a request and wait for its answer; called by several threads at a time.

        Raises:
            TransportError: if there was no answer by the channel's deadline, or the connection
                broke.
        """
        ...

    def send(self, raw: Raw, on_answer: OnAnswer) -> None:
        """Make a request without waiting; called by several threads at a time.

        Args:
            raw: the request; its bytes stay as they are until ``on_answer`` is told.
            on_answer: told what became of it, also if the channel is closed already.
        """
        ...

    def close(self) -> None:
        """Close the connection; requests under way fail at once. Twice is fine."""
        ...


class Transport(Protocol):
    """Makes listeners and channels."""

    def listen(
        self, address: str, serve: Serve, *, on_gone: Callable[[int], None], max_frame_bytes: int
    ) -> Listener:
        """Listen on an address.

        Args:
            address: where.
            serve: takes requests. A request on which it raises closes its connection.
            on_gone: told when a connection is gone; it only takes note, and calls nothing here.
            max_frame_bytes: a longer request closes its connection without being read.

        Raises:
            TransportError: if the address cannot be listened on.
        """
        ...

    def dial(
        self, address: str, *, connect_s: float, answer_s: float, max_frame_bytes: int
    ) -> Channel:
        """Connect to an address.

        Args:
            address: where.
            connect_s: how long to wait for the connection.
            answer_s: how long to wait for each answer.
            max_frame_bytes: a longer answer closes the connection without being read.

        Raises:
            TransportError: if nobody listens there.
        """
        ...

    def covers_body(self, address: str) -> bool:
        """Tell whether frames to and from the address need all their bytes signed."""
        ...

    def lay_down(self, arrays: Sequence[memoryview]) -> list[memoryview] | None:
        """Copy the arrays of an event to a place from where they go out without another copy.

        Args:
            arrays: bytes.

        Returns:
            Where they are now; None if there is no such place, or they are too small for it.
        """
        ...
