"""A peer that connects before the call that listens has returned."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from dmiddleware.pipeline import Event
from dmiddleware.router import Router
from dmiddleware.router.transport.nng_stream import NngStreamListener, NngStreamTransport
from dmiddleware.router.transport.stream import OnConnection, OnSent, Piece, Stream
from tests.accepting import accepting
from tests.waiting import wait_until

DEADLINE_S = 20.0


class SlowTransport(NngStreamTransport):
    """Listens, and returns only after a peer has connected and said hello."""

    def listen(self, address: str, on_connection: OnConnection) -> NngStreamListener:
        connected, answered = threading.Event(), threading.Event()

        def note(stream: Stream) -> float | None:
            pause_s = on_connection(_NotedStream(stream, answered))
            connected.set()
            return pause_s

        listener = super().listen(address, note)
        assert connected.wait(DEADLINE_S)
        # Its hello is answered now, or waits until this returns.
        answered.wait(0.2)
        return listener


class _NotedStream:
    """A stream that notes when something is sent."""

    def __init__(self, inner: Stream, has_sent: threading.Event) -> None:
        self._inner = inner
        self._has_sent = has_sent
        self.receive = inner.receive
        self.close = inner.close

    def send(self, pieces: Sequence[Piece], on_sent: OnSent) -> bool:
        self._has_sent.set()
        return self._inner.send(pieces, on_sent)


@pytest.mark.timeout(60)
def test_a_peer_that_connects_early_is_served(tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/early"
    arrived = threading.Event()
    with (
        Router(node_id=1, dial=[address]) as peer,
        Router(node_id=0, listen=address, transport=SlowTransport()) as router,
    ):
        router.attach(accepting(lambda name, args, kwargs: arrived.set(), waits=True))
        router.subscribe("hello", active=True)
        wait_until(lambda: peer.subscribers("hello"), "the subscription")
        # Larger than what a stranger may send.
        peer.emit(Event("hello"), (b"x" * 1_000_000,), {})
        assert arrived.wait(DEADLINE_S)
