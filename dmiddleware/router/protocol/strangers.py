"""Which connections without an authenticated peer a listener keeps."""

from __future__ import annotations

import math
import random
from collections.abc import Hashable
from typing import Final, Generic, TypeVar

__all__ = ["HANDSHAKE_S", "MAX_STRANGERS", "Strangers"]

HANDSHAKE_S: Final = 2.0
"""How long a peer may take to authenticate."""

MAX_STRANGERS: Final = 128
"""How many connections may be without an authenticated peer."""

MAX_PER_S: Final = 150
"""How many connections are accepted in a second after a burst; each costs almost 1 ms."""

BURST: Final = MAX_STRANGERS
"""How many of them are accepted at once, for example when all nodes of a run start."""

C = TypeVar("C", bound=Hashable)


class Strangers(Generic[C]):
    """The connections whose peers have not authenticated.

    If there are too many, one that has said nothing is closed before one whose hello was valid, and
    which of them is decided at random. A peer that is far away therefore gets in although others
    connect all the time; if the oldest one were closed, it would have to be faster than they are.

    Args:
        seed: the random choice depends on it; None: on the system.
        most: how many connections are kept.
        handshake_s: how long each of them is kept.
        extra: how many more connections one costs as soon as it says something, unless its peer
            authenticates; for example because of a TLS handshake.
    """

    def __init__(
        self,
        *,
        seed: int | None = None,
        most: int = MAX_STRANGERS,
        handshake_s: float = HANDSHAKE_S,
        extra: int = 0,
    ) -> None:
        if most < 1:
            raise ValueError(f"most must be at least 1, got {most}")
        self._random = random.Random(seed)
        self._most = most
        self._handshake_s = handshake_s
        self._extra_s = extra / MAX_PER_S
        # When all connections so far would have been accepted at the permitted rate.
        self._accepted_until = -math.inf
        # Both in the order of their deadlines.
        self._deadlines: dict[C, float] = {}
        self._silent: list[C] = []
        self._greeted: list[C] = []

    def __len__(self) -> int:
        return len(self._deadlines)

    def __contains__(self, connection: C) -> bool:
        return connection in self._deadlines

    def add(self, connection: C, now: float) -> C | None:
        """Add a connection; return one to close, if there are too many."""
        earliest = now - BURST / MAX_PER_S
        self._accepted_until = max(self._accepted_until, earliest) + 1 / MAX_PER_S
        closed = None
        if len(self._deadlines) >= self._most:
            closed = self._random.choice(self._silent or self._greeted)
            self.remove(closed)
        self._deadlines[connection] = now + self._handshake_s
        self._silent.append(connection)
        return closed

    def pause_s(self, now: float) -> float:
        """Return how long to wait before the next connection is accepted."""
        # Closing the one that it displaces takes a moment, too.
        least = 1 / MAX_PER_S if len(self._deadlines) >= self._most else 0.0
        return max(least, self._accepted_until - now)

    def note_hello(self, connection: C) -> None:
        """Note that a connection has sent a valid hello."""
        if connection in self._silent:
            self._silent.remove(connection)
            self._greeted.append(connection)
            self._accepted_until += self._extra_s

    def trust(self, connection: C) -> None:
        """Remove a connection whose peer has authenticated."""
        if connection in self._greeted:
            self._accepted_until -= self._extra_s
        self.remove(connection)

    def note_end(self, connection: C) -> None:
        """Remove a connection that its peer, or a mistake of its peer, has ended."""
        if connection in self._silent:
            self._accepted_until += self._extra_s
        self.remove(connection)

    def remove(self, connection: C) -> None:
        """Remove a connection."""
        if self._deadlines.pop(connection, None) is None:
            return
        group = self._silent if connection in self._silent else self._greeted
        group.remove(connection)

    def take_late(self, now: float) -> list[C]:
        """Remove and return the connections to close because their time is over."""
        late = []
        for connection, deadline in self._deadlines.items():
            if deadline > now:
                break
            late.append(connection)
        for connection in late:
            self.remove(connection)
        return late
