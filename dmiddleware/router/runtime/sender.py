"""Sends what waits for the peers, from whichever thread finds that it can go."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Final, Protocol, TypeAlias

from dmiddleware.router.protocol.node import Node
from dmiddleware.router.protocol.outgoing import Sending
from dmiddleware.router.protocol.session import Link, Parked
from dmiddleware.router.transport import Reply
from dmiddleware.router.wire.byte_pieces import Raw

__all__ = ["Connection", "Move", "PARK_S", "Pump"]

PARK_S: Final = 1.0
"""How long a poll waits for something to send."""

Move: TypeAlias = Callable[[], None]
"""Sends one frame, without waiting; to be called once, without the router's lock."""


class Connection(Protocol):
    """A connection to a peer that was dialed."""

    @property
    def link(self) -> Link:
        """The peer."""
        ...

    @property
    def has_room(self) -> bool:
        """Whether it takes one more frame now."""
        ...

    def reserve(self) -> None:
        """Take note that a frame will be sent."""
        ...

    def send(self, sending: Sending, raw: Raw) -> None:
        """Send a frame, without waiting."""
        ...


@dataclass(frozen=True, slots=True)
class _Poll:
    parked: Parked
    reply: Reply
    until: float


class Pump:
    """The ways to the peers that are free, and what goes out on them.

    A way to a dialer is a poll of its own that is parked here; to a listener, a connection that
    takes one more frame. Called with the router's lock held.

    Args:
        node: has what is to be sent.
    """

    def __init__(self, node: Node) -> None:
        self._node = node
        self._polls: dict[str, deque[_Poll]] = {}
        self._connections: dict[str, Connection] = {}

    def park(self, parked: Parked, reply: Reply, now: float) -> None:
        """Keep a poll until there is something to answer it with."""
        polls = self._polls.setdefault(parked.node_id, deque())
        polls.append(_Poll(parked, reply, now + PARK_S))

    def connect(self, connection: Connection) -> None:
        """Take a new connection to a listener, in place of an older one."""
        self._connections[connection.link.node_id] = connection

    def disconnect(self, node_id: str) -> None:
        """Forget a connection that is over."""
        self._connections.pop(node_id, None)

    def moves(self, now: float, node_ids: Iterable[str] | None = None) -> list[Move]:
        """Make frames of what waits for peers, as many as there are ways.

        Args:
            now: the time in seconds.
            node_ids: the peers; None: all.

        Returns:
            What sends them.
        """
        if node_ids is None:
            node_ids = [*self._polls, *self._connections]
        moves: list[Move] = []
        for node_id in node_ids:
            if (polls := self._polls.get(node_id)) is not None:
                while polls and (answer := self._node.resume(polls[0].parked, now)) is not None:
                    moves.append(partial(polls.popleft().reply, answer))
            if (connection := self._connections.get(node_id)) is not None:
                while connection.has_room:
                    made = self._node.data_request(connection.link, now)
                    if made is None:
                        break
                    connection.reserve()
                    moves.append(partial(connection.send, *made))
        return moves

    def end_waits(self, now: float) -> list[Move]:
        """Answer the polls that have been parked long enough."""
        moves: list[Move] = []
        for polls in self._polls.values():
            while polls and polls[0].until <= now:
                poll = polls.popleft()
                moves.append(partial(poll.reply, self._node.nothing(poll.parked)))
        return moves
