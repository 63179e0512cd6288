"""Subscriptions: which peer receives which events, and what this node subscribes to."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping
from typing import Annotated, Final, TypeAlias

import msgspec
from msgspec import Meta

from dmiddleware.errors import FrameError, FrameTooLarge, RouterError
from dmiddleware.event_names import base_name, is_glob
from dmiddleware.router.protocol.counters import TrafficCounters
from dmiddleware.router.protocol.options import NodeOptions
from dmiddleware.router.protocol.peer import Peer, PeerConnection
from dmiddleware.router.wire.envelope import (
    FRAME_OVERHEAD,
    MAX_EVENT_NAME,
    SUBSCRIPTIONS_EVENT,
    EncodedEvent,
    event_of,
)
from dmiddleware.router.wire.frame import read_metadata

__all__ = ["OWN_EVENTS", "Subscriptions"]

_logger = logging.getLogger(__name__)

OWN_EVENTS: Final = frozenset({"node.joined", "node.left", "node.rejoined", "node.forgotten"})
"""Events that each router emits itself; a peer must not."""

MAX_GLOBS: Final = 64
"""How many globs may be among the subscriptions of a node. Each of them is compared with each name,
while names are looked up."""

_encode = msgspec.msgpack.Encoder().encode
_Pattern: TypeAlias = Annotated[str, Meta(max_length=MAX_EVENT_NAME)]
_announcement_decoder = msgspec.msgpack.Decoder(tuple[bool, tuple[_Pattern, ...]])


class Subscriptions:
    """The subscriptions of this node and of its peers.

    Args:
        node_id: this node.
        peers: the peers; call :meth:`on_peers_changed` when they change.
        options: limits of this node.
        unsent: gains the connections with peers that something is queued for.
        traffic: counts the `latest` events that peers are sent.

    Attributes:
        ready: the peers that have announced all their initial subscriptions.
        n_announcements: how many announcements have arrived.
    """

    def __init__(
        self,
        node_id: str,
        peers: Mapping[str, Peer],
        options: NodeOptions,
        unsent: dict[PeerConnection, None],
        traffic: TrafficCounters,
    ) -> None:
        self.ready: set[str] = set()
        self.n_announcements = 0
        self._node_id = node_id
        self._peers = peers
        self._options = options
        self._unsent = unsent
        self._traffic = traffic
        self._own: tuple[str, ...] = ()
        self._is_ready = False
        self._latest: dict[str, EncodedEvent] = {}
        # Both are cached until the peers or their subscriptions change.
        self._subscribers: dict[str, tuple[str, ...]] = {}
        self._smallest_limit: int | None = None

    def subscribe(self, patterns: Iterable[str]) -> None:
        """Set the events (globs allowed) that this node receives, and announce them.

        Raises:
            ValueError: if these are more than ``max_event_names``, or too many of them are globs.
        """
        names = tuple(sorted(set(patterns)))
        if (problem := self._problem(names)) is not None:
            raise ValueError(problem)
        if names != self._own:
            self._own = names
            self._announce()

    def announce_ready(self) -> None:
        """Announce that all initial subscriptions of this node have been made."""
        if not self._is_ready:
            self._is_ready = True
            self._announce()

    def announce_to(self, peer: Peer) -> None:
        """Announce this node's subscriptions to a peer; a forgotten one gets them on return."""
        if peer.forgotten:
            return
        skeleton = _encode((self._is_ready, self._own))
        # Peers never wait for each other's announcements, however full the outbox is.
        peer.outgoing.outbox.offer(event_of(SUBSCRIPTIONS_EVENT, skeleton), always=True)
        self._note_queued(peer)

    def _announce(self) -> None:
        for peer in self._peers.values():
            self.announce_to(peer)

    def subscribers(self, event: str) -> tuple[str, ...]:
        """Return the peers that receive an event, disconnected ones that may return included."""
        node_ids = self._subscribers.get(event)
        if node_ids is None:
            node_ids = self._subscribers[event] = tuple(
                peer.node_id
                for peer in self._peers.values()
                if not peer.forgotten and peer.subscribes_to(event)
            )
        return node_ids

    def check(self, event: EncodedEvent, targets: Collection[str]) -> None:
        """Check that this node may send an event to the targets: its name and its size.

        Raises:
            RouterError: if one of them accepts no other event name; the error names it.
            FrameTooLarge: if one of them does not accept an event of this size.
        """
        name = base_name(event.event)
        if name in OWN_EVENTS:
            raise RouterError(f"{name!r} is emitted by the router itself; use another name")
        peers, new_to = self._peers, []
        for node_id in targets:
            peer = peers.get(node_id)
            if peer is None or name in peer.sent_names:
                continue
            most = peer.session.limits.max_event_names
            if len(peer.sent_names) >= most:
                raise RouterError(
                    f"could not emit {event.event!r}: this node has sent {most} other event names "
                    f"to node {peer.node_id}, which accepts no more; use fewer names, or raise "
                    "max_event_names in the NodeOptions of all nodes"
                )
            new_to.append(peer)
        if self._smallest_limit is None:
            limits = [peer.session.limits.max_event_bytes for peer in peers.values()]
            self._smallest_limit = min([self._options.max_event_bytes, *limits]) - FRAME_OVERHEAD
        if event.size > self._smallest_limit:
            self._check_size(event, targets)
        for peer in new_to:
            peer.sent_names.add(name)

    def _check_size(self, event: EncodedEvent, targets: Collection[str]) -> None:
        limit, who = self._options.max_event_bytes, f"this node ({self._node_id})"
        for node_id in targets:
            peer = self._peers.get(node_id)
            if peer is not None and peer.session.limits.max_event_bytes < limit:
                limit, who = peer.session.limits.max_event_bytes, f"node {peer.node_id}"
        if event.size > limit - FRAME_OVERHEAD:
            raise FrameTooLarge(
                f"the event {event.event!r} has {event.size} bytes, but {who} accepts at most "
                f"{limit - FRAME_OVERHEAD}; send it in smaller parts, or raise that limit with "
                "ditask --max-event-bytes, or NodeOptions(max_event_bytes=...) of the Router"
            )

    def check_received_names(self, peer: Peer, events: Iterable[EncodedEvent]) -> None:
        """Check that a peer may send events of these names.

        Raises:
            FrameError: if it may not.
        """
        names = {base_name(name) for name in {event.event for event in events}}
        if names <= peer.event_names:
            return
        if not names.isdisjoint(OWN_EVENTS):
            raise FrameError(
                f"node {peer.node_id} sends an event that each router emits itself: "
                + ", ".join(sorted(names & OWN_EVENTS))
            )
        peer.event_names |= names - {SUBSCRIPTIONS_EVENT}
        most = self._options.max_event_names
        if len(peer.event_names) > most:
            raise FrameError(
                f"node {peer.node_id} has used more than {most} event names; use fewer, or raise "
                "max_event_names in the NodeOptions of all nodes"
            )

    def put_latest(self, event: EncodedEvent, to: Iterable[str] | None = None) -> None:
        """Send an event that supersedes earlier ones of its name.

        Args:
            event: the event.
            to: the peers that receive it; None: all subscribers, later ones included.
        """
        if to is None:
            # Of one name, only the newest task's is kept.
            self._latest[base_name(event.event)] = event
            to = self.subscribers(event.event)
        for node_id in to:
            if (peer := self._peers.get(node_id)) is not None:
                self._queue_latest(peer, event)

    def put_lossy(self, event: EncodedEvent, to: Iterable[str]) -> None:
        """Send an event that may be dropped to the peers that have not left."""
        for node_id in to:
            if (peer := self._peers.get(node_id)) is not None:
                peer.outgoing.put_lossy(event)
                self._note_queued(peer)

    def on_announcement(self, peer: Peer, event: EncodedEvent) -> None:
        """Process the subscriptions that a peer announces.

        Raises:
            FrameError: if the announcement cannot be decoded, or has more than ``max_event_names``
                or too many globs.
        """
        ready, patterns = read_metadata(
            _announcement_decoder, event.skeleton, "announcement of subscriptions"
        )
        if (problem := self._problem(patterns)) is not None:
            raise FrameError(problem)
        had = {n for n, event in self._latest.items() if peer.has_announced_event(event.event)}
        peer.set_patterns(patterns, ready=ready)
        self.n_announcements += 1
        self.on_peers_changed()
        if ready:
            # Permanent: a peer may have done its work and left before this node checks.
            self.ready.add(peer.node_id)
        self._send_latest(peer, had)

    def _problem(self, patterns: Collection[str]) -> str | None:
        """Return why these are too many subscriptions, or None."""
        n_globs = sum(map(is_glob, patterns))
        if n_globs > MAX_GLOBS:
            return (
                f"{n_globs} globs are more than the {MAX_GLOBS} that a node may subscribe to; "
                "subscribe to names, or to fewer globs that match more"
            )
        most = self._options.max_event_names
        if len(patterns) > most:
            return (
                f"{len(patterns)} subscriptions are more than the {most} that max_event_names "
                "allows; use globs, or raise it in the NodeOptions of all nodes"
            )
        return None

    def readmit(self, peer: Peer) -> None:
        """Send to a forgotten peer again, starting with what it missed."""
        peer.forgotten = False
        self.on_peers_changed()
        self.announce_to(peer)
        self._send_latest(peer, ())

    def on_peers_changed(self) -> None:
        """Drop the caches, because the peers, their subscriptions or their limits changed."""
        self._subscribers.clear()
        self._smallest_limit = None

    def _queue_latest(self, peer: Peer, event: EncodedEvent) -> None:
        peer.outgoing.put_latest(event)
        traffic = self._traffic[base_name(event.event)]
        traffic.sent += 1
        traffic.sent_bytes += event.size
        self._note_queued(peer)

    def _note_queued(self, peer: Peer) -> None:
        if peer.connection is not None:
            self._unsent[peer.connection] = None

    def _send_latest(self, peer: Peer, had: Iterable[str]) -> None:
        for name, event in self._latest.items():
            if name in had or not peer.subscribes_to(event.event):
                continue
            try:
                self.check(event, (peer.node_id,))
            except RouterError as error:
                peer.outgoing.counters.dropped += 1
                _logger.warning("node %s does not get an event: %s", peer.node_id, error)
            else:
                self._queue_latest(peer, event)
