"""A peer that connects before the call that listens has returned."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from dmiddleware.launch.leftovers import wait_until
from dmiddleware.pipeline import Event
from dmiddleware.router import Router
from dmiddleware.router.transport.sockets import SocketTransport

DEADLINE_S = 20.0


class SlowTransport(SocketTransport):
    """Listens, and returns only once a peer has connected or the deadline is over."""

    connected = False

    def __init__(self, peer: Router) -> None:
        super().__init__()
        self._peer = peer

    def listen(self, *args: Any, **kwargs: Any) -> Any:
        listener = super().listen(*args, **kwargs)
        self.connected = wait_until(lambda: bool(self._peer.peers()), DEADLINE_S)
        return listener


@pytest.mark.timeout(60)
def test_a_peer_that_connects_early_is_served(tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/early"
    arrived = threading.Event()
    with Router(node_id=1, dial=[address]) as peer:
        transport = SlowTransport(peer)
        with Router(node_id=0, listen=address, transport=transport) as router:
            assert transport.connected
            router.attach(lambda name, args, kwargs: arrived.set())
            router.subscribe("hello", active=True)
            assert wait_until(lambda: bool(peer.subscribers("hello")), DEADLINE_S)
            # Larger than what a stranger may send.
            peer.emit(Event("hello"), (b"x" * 1_000_000,), {})
            assert arrived.wait(DEADLINE_S)
