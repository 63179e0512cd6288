"""Nodes without a router, and connections between them that are lists of frames."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

from dmiddleware.errors import (
    AuthError,
    FrameError,
    HandshakeRefused,
    RouterError,
    TransportError,
)
from dmiddleware.router.protocol.handshake import Identity
from dmiddleware.router.protocol.node import NodeProtocol, TakenEvent
from dmiddleware.router.protocol.options import NodeOptions
from dmiddleware.router.protocol.peer import Peer, PeerConnection
from dmiddleware.router.wire.byte_pieces import WireBytes
from dmiddleware.router.wire.codec import Codec
from dmiddleware.router.wire.envelope import encode_event
from dmiddleware.router.wire.frame import FrameType

KEY = bytes(range(32))
CODEC = Codec()
OPTIONS = NodeOptions(batch_bytes=200, outbox_bytes=2000, inbox_bytes=500)
BROKE = "its connection broke"


def make_node(
    name: str, key: bytes | None = KEY, start: int = 1, options: NodeOptions = OPTIONS
) -> NodeProtocol:
    """Make a node; those with the same name and another ``start`` are its later processes."""
    secrets = random.Random(f"{name}/{start}")
    return NodeProtocol(
        Identity("run", name, secrets.randbytes(16)),
        key,
        options=options,
        nonce=lambda: secrets.randbytes(32),
        session_number=lambda: secrets.randrange(1, 1 << 62),
    )


class ListRoute:
    """Frames in a list; urgent ones overtake the others.

    Args:
        chance: how many of the others they overtake; None: all of them.
    """

    def __init__(self, chance: random.Random | None = None) -> None:
        self.frames: list[bytes] = []
        self.most = 1_000_000
        self.is_closed = False
        self.n_moved = 0
        self.error: RouterError | None = None
        self.n_urgent = 0
        self._chance = chance

    @property
    def has_room(self) -> bool:
        return len(self.frames) < self.most

    def allow(self, max_frame_bytes: int) -> None:
        pass

    def put(self, frame: WireBytes, *, urgent: bool = False) -> None:
        if self.is_closed:
            return
        at = len(self.frames)
        if urgent:
            at = self.n_urgent if self._chance is None else self._chance.randint(self.n_urgent, at)
            self.n_urgent = at + 1
        self.frames.insert(at, bytes(frame))

    def pop(self) -> memoryview:
        self.n_urgent = max(0, self.n_urgent - 1)
        return memoryview(bytearray(self.frames.pop(0)))

    def flush(self) -> bool:
        return True

    def close(self, error: RouterError | None = None) -> None:
        if not self.is_closed:
            self.is_closed, self.error = True, error
            # What the system has already taken still arrives.
            n_taken = 0 if self._chance is None else self._chance.randint(0, len(self.frames))
            del self.frames[n_taken:]


class Connection:
    """A connection between a dialer, which is side 0, and a listener, side 1."""

    def __init__(
        self,
        dialer: NodeProtocol,
        listener: NodeProtocol,
        *,
        chance: random.Random | None = None,
    ) -> None:
        self.nodes = dialer, listener
        self.routes = ListRoute(chance), ListRoute(chance)
        self.ends = tuple(
            PeerConnection(route, dialed=dialed, covers_body=True)
            for route, dialed in zip(self.routes, (True, False), strict=True)
        )
        self.errors: list[RouterError] = []
        self.has_ended = [False, False]
        dialer.dial(self.ends[0])
        serve(dialer)

    def peer(self, side: int) -> Peer:
        """Return what one side knows about the other."""
        return self.nodes[side].peers[self.nodes[1 - side].identity.node_id]

    @property
    def is_open(self) -> bool:
        """Whether both sides use it."""
        return all(end.peer is not None and end.peer.connection is end for end in self.ends)

    def fill(self, side: int) -> None:
        """Make the frames of a side that can be sent."""
        self.nodes[side].fill(self.ends[side])

    def make_due(self, side: int) -> None:
        """Make the frames that a router would make now."""
        serve(self.nodes[side])
        if self.ends[side].is_stalled and self.routes[side].has_room:
            self.fill(side)

    def can_deliver(self, side: int) -> bool:
        """Whether a frame of a side, or its end, can arrive."""
        return bool(self.routes[side].frames) or (
            self.routes[side].is_closed and not self.has_ended[1 - side]
        )

    def deliver(self, side: int, now: float = 0.0) -> FrameType | None:
        """Let the next frame of a side, or its end, arrive at the other one."""
        route = self.routes[side]
        if not route.frames:
            self.end(1 - side, now)
            return None
        return self.receive(1 - side, route.pop(), now)

    def receive(self, side: int, raw: Any, now: float = 0.0) -> FrameType | None:
        """Let a frame arrive at a side."""
        node, end = self.nodes[side], self.ends[side]
        if self.routes[side].is_closed:
            return None
        kind = None
        try:
            kind = node.on_frame(end, memoryview(raw), now)
        except (FrameError, AuthError, HandshakeRefused) as error:
            self.errors.append(error)
            end.route.close(error)
        serve(node)
        return kind

    def end(self, side: int, now: float = 0.0, reason: str = BROKE) -> None:
        """End a side, if it has not ended."""
        if not self.has_ended[side]:
            self.has_ended[side] = True
            self.routes[side].close()
            self.nodes[side].on_end(self.ends[side], reason, now)
            serve(self.nodes[side])

    def end_closed(self, now: float = 0.0) -> None:
        """End both sides if one is closed."""
        if any(route.is_closed for route in self.routes):
            self.cut(now)

    def cut(self, now: float = 0.0) -> None:
        """Break the connection, with everything that is on its way."""
        for side in (0, 1):
            self.routes[side].close()
            self.routes[side].frames.clear()
            self.end(side, now)


def serve(node: NodeProtocol) -> None:
    """Do what a node has asked for."""
    while node.unsent or node.ended:
        unsent = list(node.unsent)
        node.unsent.clear()
        for connection in unsent:
            node.fill(connection)
        ended, node.ended = node.ended, []
        for connection, reason in ended:
            connection.route.close(TransportError(reason))


def join(dialer: NodeProtocol, listener: NodeProtocol, now: float = 0.0) -> Connection:
    """Connect two nodes, and raise the dialer's error if that fails."""
    connection = Connection(dialer, listener)
    while any(end.session is None for end in connection.ends) and not connection.errors:
        side = 0 if connection.routes[0].frames else 1
        connection.deliver(side, now)
    if connection.errors:
        connection.cut(now)
        raise connection.errors[0]
    return connection


def exchange(connection: Connection, now: float = 0.0, *, rounds: int = 1_000_000) -> None:
    """Exchange everything that waits, both ways; each round is one frame of each side."""
    for _ in range(rounds):
        for side in (0, 1):
            connection.make_due(side)
        if not any(route.frames for route in connection.routes):
            break
        for side in (0, 1):
            if connection.routes[side].frames:
                connection.deliver(side, now)
    if connection.errors:
        connection.cut(now)
        raise connection.errors[0]
    connection.end_closed(now)


def beat(connection: Connection, now: float = 0.0) -> None:
    """Let both sides send a heartbeat, and exchange everything."""
    for node in connection.nodes:
        node.beat()
        serve(node)
    exchange(connection, now)


def reconnect(connection: Connection, now: float = 0.0) -> Connection:
    """Break a connection and make a new one between the same nodes."""
    connection.cut(now)
    return join(*connection.nodes, now)


def emit(
    node: NodeProtocol, to: str, event: str, value: Any, *, handled: bool = False
) -> bool | None:
    return node.offer(to, encode_event(event, value, CODEC), handled=handled)


def taken(node: NodeProtocol) -> list[tuple[str, str, Any]]:
    """Take all events, and handle those that are acknowledged when handled."""
    events = node.take(100)
    handle(node, events)
    return [
        (peer.node_id, event.event, CODEC.decode(event.skeleton, event.buffers))
        for event, peer, _ in events
    ]


def handle(node: NodeProtocol, events: Iterable[TakenEvent]) -> None:
    """Note that events were handled."""
    for _, peer, acknowledges in events:
        if acknowledges:
            node.on_handled(peer)
    serve(node)


def kinds(nodes: Iterable[NodeProtocol]) -> list[list[str]]:
    """Return which membership changes each node has seen."""
    return [[change.kind for change in node.changes] for node in nodes]
