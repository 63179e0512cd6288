"""A peer that connects before the call that listens has returned."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from dmiddleware.launch.leftovers import wait_until
from dmiddleware.pipeline import Event
from dmiddleware.router import Router
from dmiddleware.router.transport.nng_stream import NngStreamListener, NngStreamTransport
from dmiddleware.router.transport.stream import OnConnection, Stream
from tests.accepting import accepting

DEADLINE_S = 20.0


class SlowTransport(NngStreamTransport):
    """Listens, and returns only after a peer has connected and said hello."""

    def listen(self, address: str, on_connection: OnConnection) -> NngStreamListener:
        connected = threading.Event()

        def note(stream: Stream) -> float:
            pause_s = on_connection(stream)
            connected.set()
            return pause_s

        listener = super().listen(address, note)
        assert connected.wait(DEADLINE_S)
        # Its hello arrives meanwhile.
        time.sleep(0.2)
        return listener


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
        assert wait_until(lambda: bool(peer.subscribers("hello")), DEADLINE_S)
        # Larger than what a stranger may send.
        peer.emit(Event("hello"), (b"x" * 1_000_000,), {})
        assert arrived.wait(DEADLINE_S)
