"""Who wants which event: what peers have said of it, and what this node says to them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from dmiddleware.errors import FrameTooLarge
from dmiddleware.router.protocol.limits import NodeOptions
from dmiddleware.router.protocol.session import Link
from dmiddleware.router.wire.envelope import FRAME_OVERHEAD, WANTS_EVENT, EncodedEvent
from dmiddleware.router.wire.frame import MAX_BUFFERS, read_metadata

__all__ = ["Audience"]

_encode = msgspec.msgpack.Encoder().encode
_wants = msgspec.msgpack.Decoder(tuple[bool, tuple[str, ...]])


class Audience:
    """What this node and its peers want of each other.

    Args:
        node_id: this node.
        links: the peers; :meth:`on_links_changed` is called when they change.
        options: bounds.

    Attributes:
        ready: the peers that have said all that they want at the start.
        n_told: how often a peer has said what it wants.
    """

    def __init__(self, node_id: str, links: Mapping[str, Link], options: NodeOptions) -> None:
        self.ready: set[str] = set()
        self.n_told = 0
        self._node_id = node_id
        self._links = links
        self._options = options
        self._wants: tuple[str, ...] = ()
        self._is_ready = False
        self._newest: dict[str, EncodedEvent] = {}
        # Both are worked out anew when links, or what they want, have changed.
        self._targets: dict[str, tuple[str, ...]] = {}
        self._least_bound = 0

    # What this node wants ---------------------------------------------------------------------

    def want(self, patterns: Iterable[str]) -> None:
        """State which events (globs allowed) this node takes; peers are told."""
        wants = tuple(sorted(set(patterns)))
        if wants != self._wants:
            self._wants = wants
            for link in self._links.values():
                self.tell(link)

    def get_ready(self) -> None:
        """Tell the peers that all that this node wants at the start has been said."""
        if not self._is_ready:
            self._is_ready = True
            for link in self._links.values():
                self.tell(link)

    def tell(self, link: Link) -> None:
        """Tell a peer what this node wants; one that is forgotten is told when it is back."""
        if link.forgotten:
            return
        skeleton = _encode((self._is_ready, self._wants))
        link.outgoing.push(EncodedEvent(WANTS_EVENT, skeleton, (), len(skeleton)))

    # What peers want --------------------------------------------------------------------------

    def targets(self, event: str) -> tuple[str, ...]:
        """Return the peers that take an event, those included that may come back."""
        found = self._targets.get(event)
        if found is None:
            found = self._targets[event] = tuple(
                link.node_id
                for link in self._links.values()
                if not link.forgotten and link.is_wanted(event)
            )
        return found

    def check_size(self, event: EncodedEvent, targets: Iterable[str]) -> None:
        """Make sure that this node and the targets take an event as large as this.

        Raises:
            FrameTooLarge: if one does not; it names it.
        """
        if event.size <= self._least_bound and len(event.buffers) < MAX_BUFFERS:
            return
        bound, who = self._options.max_frame_bytes, ""
        for node_id in targets:
            link = self._links.get(node_id)
            if link is not None and link.session.limits.max_frame_bytes < bound:
                bound, who = link.session.limits.max_frame_bytes, node_id
        if event.size > bound - FRAME_OVERHEAD:
            name = f"node {who}" if who else f"this node ({self._node_id})"
            raise FrameTooLarge(
                f"the event {event.event!r} has {event.size} bytes, and {name} takes at most "
                f"{bound - FRAME_OVERHEAD}; send it in parts, or raise max_frame_bytes on all nodes"
            )
        if len(event.buffers) >= MAX_BUFFERS:
            raise FrameTooLarge(
                f"the event {event.event!r} has {len(event.buffers)} arrays, at most "
                f"{MAX_BUFFERS - 1} can be sent; join them into fewer, or send it in parts"
            )

    def put_latest(self, event: EncodedEvent) -> None:
        """Send an event that makes earlier ones of its name worthless; newcomers get it too."""
        self._newest[event.event] = event
        for node_id in self.targets(event.event):
            self._links[node_id].outgoing.put_latest(event)

    def hear(self, link: Link, event: EncodedEvent) -> None:
        """Take what a peer says that it wants.

        Raises:
            FrameError: if it says nothing that can be read.
        """
        ready, wants = read_metadata(_wants, event.skeleton, "list of events")
        had = {name for name in self._newest if link.told_wants and link.is_wanted(name)}
        link.wants, link.told_wants = wants, True
        self.n_told += 1
        link.matches.clear()
        self.on_links_changed()
        if ready:
            # For good: a peer may have done its work and gone before this node looks.
            self.ready.add(link.node_id)
        self._send_newest(link, had)

    def remember(self, link: Link) -> None:
        """Count on a peer again that was forgotten, and tell it anew what was dropped meanwhile."""
        link.forgotten = False
        self.on_links_changed()
        self.tell(link)
        self._send_newest(link, ())

    def on_links_changed(self) -> None:
        """Take note that there are other peers, or that they have other bounds."""
        self._targets.clear()
        bounds = [link.session.limits.max_frame_bytes for link in self._links.values()]
        self._least_bound = min([self._options.max_frame_bytes, *bounds]) - FRAME_OVERHEAD

    def _send_newest(self, link: Link, had: Iterable[str]) -> None:
        for name, newest in self._newest.items():
            if name not in had and link.is_wanted(name):
                if newest.size + FRAME_OVERHEAD <= link.session.limits.max_frame_bytes:
                    link.outgoing.put_latest(newest)
                else:
                    link.outgoing.counters.dropped += 1
