"""The listening side: whose connection is gone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dmiddleware.pipeline import SystemClock
from dmiddleware.router.runtime.engine import Engine
from dmiddleware.router.runtime.listener import NodeListener
from dmiddleware.router.transport import RequestHandler
from dmiddleware.router.wire.frame import FrameType
from tests.dmiddleware.router.node_pairs import CODEC, make_node


class Network:
    """A transport over which a test itself brings requests and ends connections."""

    address = "memory://here"
    serve: RequestHandler
    on_disconnect: Callable[[int], None]

    def listen(self, address: str, serve: RequestHandler, **options: Any) -> Network:
        self.serve, self.on_disconnect = serve, options["on_disconnect"]
        return self

    def covers_body(self, address: str) -> bool:
        return True

    def ask(self, raw: Any, connection: int) -> bytes:
        answers: list[Any] = []
        self.serve(memoryview(bytes(raw)), connection, answers.append)
        return bytes(answers[0])


def test_a_request_served_after_its_connection_broke_does_not_keep_the_peer_connected() -> None:
    network, node, dialer = Network(), make_node("0"), make_node("1")
    engine = Engine(node, transport=network, codec=CODEC, clock=SystemClock())  # type: ignore[arg-type]
    listener = NodeListener(engine, "memory://here")
    handshake, hello = dialer.hello()
    auth = dialer.on_challenge(handshake, network.ask(hello, 1))
    peer = dialer.on_welcome(handshake, network.ask(auth, 1), 0.0, cover_body=True)
    for connection in (1, 2):
        network.ask(dialer.request(peer, FrameType.HEARTBEAT), connection)
    network.on_disconnect(2)
    listener.process_disconnects(0.0)
    assert node.is_connected("1"), "it has another connection"
    network.ask(dialer.request(peer, FrameType.HEARTBEAT), 2)
    network.on_disconnect(1)
    listener.process_disconnects(0.0)
    assert not node.is_connected("1")
