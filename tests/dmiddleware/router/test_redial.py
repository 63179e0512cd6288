"""A peer that was restarted at another address."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from dmiddleware.errors import TopologyError
from dmiddleware.launch.leftovers import wait_until
from dmiddleware.pipeline import Event
from dmiddleware.router import Router
from tests.accepting import accepting

DEADLINE_S = 20.0


@pytest.mark.timeout(60)
def test_events_reach_a_peer_that_has_moved(tmp_path: Path) -> None:
    old, new = f"ipc://{tmp_path}/old", f"ipc://{tmp_path}/new"
    arrived = threading.Event()
    with Router(node_id=1, dial=[old]) as peer:
        with Router(node_id=0, listen=old) as first:
            assert wait_until(lambda: bool(peer.peers()), DEADLINE_S)
            first.close(goodbye=False)
        with Router(node_id=0, listen=new) as second:
            second.attach(accepting(lambda name, args, kwargs: arrived.set(), waits=True))
            second.subscribe("hello", active=True)
            peer.redial(old, new)
            peer.redial(old, new)  # the old address is not dialed any more
            assert wait_until(lambda: bool(peer.subscribers("hello")), DEADLINE_S)
            peer.emit(Event("hello"), (), {})
            assert arrived.wait(DEADLINE_S)
            # Nothing dials the old address: a stranger there gets no connection.
            with Router(node_id=2, listen=old) as stranger:
                assert not wait_until(lambda: bool(stranger.peers()), 3.0)


@pytest.mark.timeout(60)
def test_only_addresses_that_are_dialed_are_replaced(tmp_path: Path) -> None:
    with Router(node_id=1, dial=[f"ipc://{tmp_path}/hub"]) as peer:
        peer.redial(f"ipc://{tmp_path}/other", f"ipc://{tmp_path}/new")
        with Router(node_id=0, listen=f"ipc://{tmp_path}/new") as other:
            assert not wait_until(lambda: bool(other.peers()), 2.0)
        with pytest.raises(TopologyError):
            peer.redial(f"ipc://{tmp_path}/hub", "nowhere")
