"""Two nodes without a router: their handshake, and the exchange of events between them."""

from __future__ import annotations

import itertools
import random
from typing import Any

from dmiddleware.router.protocol.handshake import Identity
from dmiddleware.router.protocol.node import NodeProtocol
from dmiddleware.router.protocol.options import NodeOptions
from dmiddleware.router.protocol.session import ParkedPoll, PeerSession
from dmiddleware.router.wire.codec import Codec
from dmiddleware.router.wire.envelope import encode_event
from dmiddleware.router.wire.frame import FrameContents, FrameType, OutgoingFrame

KEY = bytes(range(32))
CODEC = Codec()
OPTIONS = NodeOptions(retry_s=1.0, window=4, batch_bytes=200, outbox_bytes=2000, inbox_bytes=500)


def make_node(
    name: str, key: bytes | None = KEY, start: int = 1, options: NodeOptions = OPTIONS
) -> NodeProtocol:
    """Make a node; those with the same name and another ``start`` are its later processes."""
    numbers = itertools.count(1)
    secrets = random.Random(f"{name}/{start}")
    return NodeProtocol(
        Identity("run", name, secrets.randbytes(16)),
        key,
        options=options,
        nonce=lambda: secrets.randbytes(32),
        session_number=lambda: next(numbers),
    )


def join(dialer: NodeProtocol, listener: NodeProtocol, now: float = 0.0) -> PeerSession:
    handshake, hello = dialer.hello()
    auth = dialer.on_challenge(handshake, replied(listener, hello, now))
    return dialer.on_welcome(handshake, replied(listener, auth, now), now, cover_body=True)


def replied(listener: NodeProtocol, raw: bytes | bytearray, now: float) -> bytearray:
    answer = listener.on_request(bytes(raw), now, cover_body=True).content
    return bytearray(bytes(nothing(listener, answer) if isinstance(answer, ParkedPoll) else answer))


def nothing(listener: NodeProtocol, parked: ParkedPoll) -> OutgoingFrame:
    """Return a reply to a poll that carries nothing; otherwise it waits for an event."""
    return OutgoingFrame(
        FrameType.ACK,
        FrameContents(),
        listener.peers[parked.node_id].sign,
        max_size=1 << 20,
        session=parked.session,
        incarnation=listener.incarnation,
        sequence=parked.number,
    )


def asked(
    dialer: NodeProtocol,
    listener: NodeProtocol,
    peer: PeerSession,
    kind: FrameType,
    now: float = 0.0,
) -> FrameType:
    request = dialer.request(peer, kind)
    return dialer.on_reply(peer, request, replied(listener, request.raw, now), now)


def emit(
    node: NodeProtocol, to: str, event: str, value: Any, *, handled: bool = False
) -> bool | None:
    return node.offer(to, encode_event(event, value, CODEC), handled=handled)


def taken(node: NodeProtocol) -> list[tuple[str, str, Any]]:
    return [(who, e.event, CODEC.decode(e.skeleton, e.buffers)) for who, e in node.take(100)]


def exchange(
    dialer: NodeProtocol, listener: NodeProtocol, peer: PeerSession, now: float = 0.0
) -> None:
    """Exchange everything that is waiting, both ways, over a perfect network."""
    while (request := dialer.data_request(peer, now)) is not None:
        dialer.on_reply(peer, request, replied(listener, request.raw, now), now)
    kind = FrameType.DATA
    while kind in (FrameType.DATA, FrameType.FRAGMENT):
        kind = asked(dialer, listener, peer, FrameType.POLL, now)
