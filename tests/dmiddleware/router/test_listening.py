"""The listening side: whose connection is gone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dmiddleware.pipeline import SystemClock
from dmiddleware.router.core import Core
from dmiddleware.router.runtime.listener import Listening
from dmiddleware.router.transport import Serve
from dmiddleware.router.wire.frame import FrameType
from tests.dmiddleware.router.test_node import CODEC, make_node


class Network:
    """A transport over which a test itself brings requests and ends connections."""

    address = "memory://here"
    serve: Serve
    on_gone: Callable[[int], None]

    def listen(self, address: str, serve: Serve, **options: Any) -> Network:
        self.serve, self.on_gone = serve, options["on_gone"]
        return self

    def covers_body(self, address: str) -> bool:
        return True

    def ask(self, raw: Any, connection: int) -> bytes:
        answers: list[Any] = []
        self.serve(memoryview(bytes(raw)), connection, answers.append)
        return bytes(answers[0])


def test_a_request_that_outlives_its_connection_does_not_keep_the_dead_alive() -> None:
    network, node, dialer = Network(), make_node("0"), make_node("1")
    core = Core(node, transport=network, codec=CODEC, clock=SystemClock())  # type: ignore[arg-type]
    listening = Listening(core, "memory://here")
    handshake, hello = dialer.hello()
    auth = dialer.on_challenge(handshake, network.ask(hello, 1))
    link = dialer.on_welcome(handshake, network.ask(auth, 1), 0.0, cover_body=True)
    for connection in (1, 2):
        network.ask(dialer.request(link, FrameType.HEARTBEAT), connection)
    network.on_gone(2)
    listening.lose_connections(0.0)
    assert node.is_here("1"), "it has another connection"
    network.ask(dialer.request(link, FrameType.HEARTBEAT), 2)
    network.on_gone(1)
    listening.lose_connections(0.0)
    assert not node.is_here("1")
