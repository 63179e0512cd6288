"""Listening: how broken connections are noticed."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from dmiddleware.pipeline import SystemClock
from dmiddleware.router.runtime.engine import Engine
from dmiddleware.router.runtime.listener import NodeListener
from dmiddleware.router.transport import RequestHandler
from dmiddleware.router.wire.byte_pieces import WireBytes
from dmiddleware.router.wire.frame import FrameType
from tests.dmiddleware.router.node_pairs import CODEC, make_node


class Network:
    """A transport whose requests and disconnects are made by the test."""

    address = "memory://here"
    serve: RequestHandler
    on_disconnect: Callable[[int], None]

    def __init__(self) -> None:
        self.moved: Counter[int] = Counter()

    def listen(self, address: str, serve: RequestHandler, **options: Any) -> Network:
        self.serve, self.on_disconnect = serve, options["on_disconnect"]
        return self

    def covers_body(self, address: str) -> bool:
        return True

    def trust(self, connection: int) -> None:
        pass

    def n_bytes(self, connection: int) -> int:
        return self.moved[connection]

    def make_requests(self, raw: Any, connection: int) -> bytes:
        replies: list[Any] = []

        def reply(answer: WireBytes | None, *, urgent: bool = False) -> None:
            replies.append(answer)

        self.serve(memoryview(bytes(raw)), connection, reply)
        return bytes(replies[0] or b"")


def test_a_request_served_after_its_connection_broke_does_not_keep_the_peer_connected() -> None:
    network, node, dialer = Network(), make_node("0"), make_node("1")
    engine = Engine(node, transport=network, codec=CODEC, clock=SystemClock())  # type: ignore[arg-type]
    listener = NodeListener(engine, "memory://here")
    handshake, hello = dialer.hello()
    auth = dialer.on_challenge(handshake, network.make_requests(hello, 1))
    peer = dialer.on_welcome(handshake, network.make_requests(auth, 1), 0.0, cover_body=True)
    for connection in (1, 2):
        network.make_requests(dialer.request(peer, FrameType.HEARTBEAT).raw, connection)
    network.on_disconnect(2)
    listener.process_disconnects(0.0)
    assert node.is_connected("1"), "it has another connection"
    network.make_requests(dialer.request(peer, FrameType.HEARTBEAT).raw, 2)
    network.on_disconnect(1)
    listener.process_disconnects(0.0)
    assert not node.is_connected("1")


def test_a_request_that_cannot_be_processed_does_not_stop_the_service(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    network, node, dialer = Network(), make_node("0"), make_node("1")
    engine = Engine(node, transport=network, codec=CODEC, clock=SystemClock())  # type: ignore[arg-type]
    NodeListener(engine, "memory://here")
    on_request = node.on_request

    def fail(raw: Any, now: float, **options: Any) -> Any:
        if bytes(raw) == b"a defect":
            raise KeyError("a defect")
        return on_request(raw, now, **options)

    monkeypatch.setattr(node, "on_request", fail)
    assert network.make_requests(b"a defect", 1) == b""
    assert node.n_refused == 1 and "KeyError" in caplog.text
    other_thread = threading.Thread(target=engine.flush, daemon=True)
    other_thread.start()
    other_thread.join(5.0)
    assert not other_thread.is_alive(), "the lock was released"
    handshake, hello = dialer.hello()
    assert dialer.on_challenge(handshake, network.make_requests(hello, 2))


def test_a_silent_peer_stays_connected_while_its_connection_carries_bytes() -> None:
    network, node, dialer = Network(), make_node("0"), make_node("1")
    engine = Engine(node, transport=network, codec=CODEC, clock=SystemClock())  # type: ignore[arg-type]
    listener = NodeListener(engine, "memory://here")
    handshake, hello = dialer.hello()
    auth = dialer.on_challenge(handshake, network.make_requests(hello, 1))
    dialer.on_welcome(handshake, network.make_requests(auth, 1), 0.0, cover_body=True)
    now = engine.clock.now()
    for seconds in range(2, 8):
        network.moved[1] += 1000
        listener.note_progress(now + seconds)
        node.tick(now + seconds)
    assert node.is_connected("1")
    listener.note_progress(now + 9)
    node.tick(now + 11)
    assert not node.is_connected("1"), "nothing has moved any more"
