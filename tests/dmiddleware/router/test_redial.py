"""A peer that was restarted at another address."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from dmiddleware.errors import TopologyError, WaitTimeout
from dmiddleware.pipeline import Event
from dmiddleware.router import Router
from tests.accepting import accepting
from tests.waiting import wait_until

DEADLINE_S = 20.0


@pytest.mark.timeout(60)
def test_events_reach_a_peer_that_has_moved(tmp_path: Path) -> None:
    old, new = f"ipc://{tmp_path}/old", f"ipc://{tmp_path}/new"
    arrived = threading.Event()
    with Router(node_id=1, dial=[old]) as peer:
        with Router(node_id=0, listen=old) as first:
            wait_until(peer.peers, "the connection")
            first.close(goodbye=False)
        with Router(node_id=0, listen=new) as second:
            second.attach(accepting(lambda name, args, kwargs: arrived.set(), waits=True))
            second.subscribe("hello", active=True)
            peer.redial(old, new)
            peer.redial(old, new)  # the old address is not dialed any more
            wait_until(lambda: peer.subscribers("hello"), "the subscription")
            peer.emit(Event("hello"), (), {})
            assert arrived.wait(DEADLINE_S)
            # Nothing dials the old address: a stranger there gets no connection.
            with Router(node_id=2, listen=old) as stranger, pytest.raises(WaitTimeout):
                stranger.wait_for_peers(1, timeout_s=3.0)


@pytest.mark.timeout(60)
def test_only_addresses_that_are_dialed_are_replaced(tmp_path: Path) -> None:
    with Router(node_id=1, dial=[f"ipc://{tmp_path}/hub"]) as peer:
        peer.redial(f"ipc://{tmp_path}/other", f"ipc://{tmp_path}/new")
        with (
            Router(node_id=0, listen=f"ipc://{tmp_path}/new") as other,
            pytest.raises(WaitTimeout),
        ):
            other.wait_for_peers(1, timeout_s=2.0)
        with pytest.raises(TopologyError):
            peer.redial(f"ipc://{tmp_path}/hub", "nowhere")
