"""Sending: pairs what is waiting for a peer with the routes to it."""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol, TypeAlias

from dmiddleware.router.protocol.node import NodeProtocol
from dmiddleware.router.protocol.session import ParkedPoll, PeerSession, Request
from dmiddleware.router.transport import Reply

__all__ = ["DataChannel", "SendAction", "Sender", "send_all"]

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

    def send(self, request: Request) -> None:
        """Send a frame without blocking."""
        ...


@dataclass(eq=False, slots=True)
class _Poll:
    parked: ParkedPoll
    reply: Reply


@dataclass(eq=False, slots=True)
class _Link:
    """The open routes to one peer, and the frames that are on their way to it.

    Frames are made under the router's lock and sent without it. One thread at a time sends those of
    a link, so that they leave in the order in which they were made.
    """

    polls: deque[_Poll] = field(default_factory=deque)
    channel: DataChannel | None = None
    unsent: deque[SendAction] = field(default_factory=deque)
    sending: threading.Lock = field(default_factory=threading.Lock)

    @property
    def is_unused(self) -> bool:
        """Whether it has neither a route nor frames to send."""
        return not (self.polls or self.unsent) and self.channel is None

    def send(self) -> None:
        """Send what is on its way, unless another thread does."""
        while self.unsent and self.sending.acquire(blocking=False):
            try:
                while self.unsent:
                    self.unsent.popleft()()
            finally:
                self.sending.release()


class Sender:
    """The open routes to the peers: parked polls of dialers, and channels to listeners.

    All methods are called with the router's lock held.

    Args:
        node: makes the frames.

    Attributes:
        due: when frames are sent again, for each peer that has not acknowledged all of them.
        earliest: the earliest of the times that were noted since :meth:`earliest_after`.
    """

    def __init__(self, node: NodeProtocol) -> None:
        self.due: dict[str, float] = {}
        self.earliest = math.inf
        self._node = node
        self._links: dict[str, _Link] = {}

    def park(self, parked: ParkedPoll, reply: Reply) -> None:
        """Keep a poll until there is something to reply with."""
        self._link(parked.node_id).polls.append(_Poll(parked, reply))

    def connect(self, channel: DataChannel) -> None:
        """Add a channel to a listener; it replaces an older one."""
        self._link(channel.peer.node_id).channel = channel

    def disconnect(self, node_id: str) -> None:
        """Remove the channel to a listener."""
        self._link(node_id).channel = None

    def take_sends(self, now: float, node_ids: Iterable[str] = ()) -> list[SendAction]:
        """Make frames of what is waiting, as many as there are open routes.

        Args:
            now: the time in seconds.
            node_ids: the peers, in addition to those that the node names in ``unsent``.

        Returns:
            The actions that send them.
        """
        node = self._node
        if node.unsent:
            node_ids = dict.fromkeys(node_ids) | node.unsent
            node.unsent.clear()
        sends: list[SendAction] = []
        for node_id in node_ids:
            link = self._links.get(node_id)
            if link is not None and self._fill(link, now):
                sends.append(link.send)
            if link is not None and node_id not in node.peers and link.is_unused:
                del self._links[node_id]
            due_at = node.due_at(node_id)
            if due_at is not None:
                self.due[node_id] = due_at
                if now < due_at < self.earliest:
                    self.earliest = due_at
            elif node_id in self.due:
                del self.due[node_id]
        return sends

    def overdue(self, now: float) -> list[str]:
        """Return the peers to which frames should have been sent again by now."""
        return [node_id for node_id, due_at in self.due.items() if due_at <= now]

    def earliest_after(self, now: float) -> float:
        """Return when the next frame is sent again; infinity: never."""
        self.earliest = min((at for at in self.due.values() if at > now), default=math.inf)
        return self.earliest

    def _link(self, node_id: str) -> _Link:
        link = self._links.get(node_id)
        if link is None:
            link = self._links[node_id] = _Link()
        return link

    def _fill(self, link: _Link, now: float) -> bool:
        """Make frames for the open routes to a peer; return whether there were any to make."""
        filled = False
        while link.polls:
            frame = self._node.resume(link.polls[0].parked, now)
            if frame is None:
                break
            link.unsent.append(partial(link.polls.popleft().reply, frame))
            filled = True
        channel = link.channel
        while channel is not None and channel.has_room:
            request = self._node.data_request(channel.peer, now)
            if request is None:
                break
            channel.reserve()
            link.unsent.append(partial(channel.send, request))
            filled = True
        return filled


def send_all(sends: Iterable[SendAction]) -> None:
    """Run send actions; called without the router's lock, unless the caller must keep it."""
    for send in sends:
        send()
