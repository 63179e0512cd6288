"""What the router needs of a transport."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from dmiddleware.router.parts import Raw

__all__ = ["Channel", "Listener", "Serve", "Transport"]


class Serve(Protocol):
    """Answers one request; called by several threads at a time, and may take a second."""

    def __call__(self, raw: memoryview, connection: int) -> Raw | None:
        """Answer a request.

        Args:
            raw: the request; its memory stays valid as long as a view of it is alive.
            connection: a number of the connection that it came over.

        Returns:
            The answer; None closes the connection without one.
        """
        ...


class Listener(Protocol):
    """An address that is listened on."""

    @property
    def address(self) -> str:
        """Where others can dial; port 0 has become a real one."""
        ...

    def grow(self, workers: int) -> None:
        """Serve at least so many requests at a time."""
        ...

    def close(self) -> None:
        """Stop listening; requests being served get no answer. Twice is fine."""
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
            serve: answers requests.
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
