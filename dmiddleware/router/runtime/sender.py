"""Sending: pairs what is waiting for a peer with the routes to it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Final, Protocol, TypeAlias

from dmiddleware.router.protocol.node import NodeProtocol
from dmiddleware.router.protocol.session import ParkedPoll, PeerSession
from dmiddleware.router.protocol.streams import EventBatch
from dmiddleware.router.transport import Reply
from dmiddleware.router.wire.byte_pieces import WireBytes

__all__ = ["DataChannel", "POLL_TIMEOUT_S", "SendAction", "Sender", "send_all"]

POLL_TIMEOUT_S: Final = 1.0
"""How long a poll waits for something to send."""

SendAction: TypeAlias = Callable[[], None]
"""Sends one frame without blocking; called once, without the router's lock."""


class DataChannel(Protocol):
    """A connection to a listener that carries events."""

    @property
    def peer(self) -> PeerSession:
        """The listener."""
        ...

    @property
    def has_room(self) -> bool:
        """Whether one more frame may be sent now."""
        ...

    def reserve(self) -> None:
        """Count a frame that is about to be sent."""
        ...

    def send(self, batch: EventBatch, raw: WireBytes) -> None:
        """Send a frame without blocking."""
        ...


@dataclass(frozen=True, slots=True)
class _Poll:
    parked: ParkedPoll
    reply: Reply
    until: float


class Sender:
    """The open routes to the peers: parked polls of dialers, and channels to listeners.

    All methods are called with the router's lock held.

    Args:
        node: makes the frames.
    """

    def __init__(self, node: NodeProtocol) -> None:
        self._node = node
        self._polls: dict[str, deque[_Poll]] = {}
        self._channels: dict[str, DataChannel] = {}

    def park(self, parked: ParkedPoll, reply: Reply, now: float) -> None:
        """Keep a poll until there is something to reply with."""
        polls = self._polls.setdefault(parked.node_id, deque())
        polls.append(_Poll(parked, reply, now + POLL_TIMEOUT_S))

    def connect(self, channel: DataChannel) -> None:
        """Add a channel to a listener; it replaces an older one."""
        self._channels[channel.peer.node_id] = channel

    def disconnect(self, node_id: str) -> None:
        """Remove the channel to a listener."""
        self._channels.pop(node_id, None)

    def take_sends(self, now: float, node_ids: Iterable[str] | None = None) -> list[SendAction]:
        """Make frames of what is waiting, as many as there are open routes.

        Args:
            now: the time in seconds.
            node_ids: the peers; None: all.

        Returns:
            The actions that send them.
        """
        if node_ids is None:
            node_ids = [*self._polls, *self._channels]
        sends: list[SendAction] = []
        for node_id in node_ids:
            if (polls := self._polls.get(node_id)) is not None:
                while polls and (frame := self._node.resume(polls[0].parked, now)) is not None:
                    sends.append(partial(polls.popleft().reply, frame))
            if (channel := self._channels.get(node_id)) is not None:
                while channel.has_room:
                    request = self._node.data_request(channel.peer, now)
                    if request is None:
                        break
                    channel.reserve()
                    sends.append(partial(channel.send, *request))
        return sends

    def expire_polls(self, now: float) -> list[SendAction]:
        """Reply to the polls that have waited for :data:`POLL_TIMEOUT_S`."""
        sends: list[SendAction] = []
        for polls in self._polls.values():
            while polls and polls[0].until <= now:
                poll = polls.popleft()
                sends.append(partial(poll.reply, self._node.nothing(poll.parked)))
        return sends


def send_all(sends: Iterable[SendAction]) -> None:
    """Run send actions; called without the router's lock, unless the caller must keep it."""
    for send in sends:
        send()
