"""Dialing through someone who forges and replays what the listener says."""

from __future__ import annotations

import itertools
import time
from pathlib import Path
from typing import Any

import pytest

from dmiddleware.errors import HandshakeRefused
from dmiddleware.pipeline import Event
from dmiddleware.router import NodeOptions, Router
from dmiddleware.router.transport import Channel, OnReply
from dmiddleware.router.transport.sockets import SocketTransport
from dmiddleware.router.wire.byte_pieces import WireBytes
from dmiddleware.router.wire.frame import FrameType, type_of
from tests.dmiddleware.router.tampering import TamperingTransport, forged_refusal
from tests.dmiddleware.router.unix_sockets import comes_true

KEY = bytes(range(32))
DEADLINE_S = 20.0


@pytest.mark.parametrize("code", ["replaced", "run", "key", "node_id_taken", "version"])
@pytest.mark.parametrize("phase", [FrameType.HELLO, FrameType.AUTH])
def test_forged_refusals_only_delay_a_dialer(tmp_path: Path, code: str, phase: FrameType) -> None:
    attempts = itertools.count()

    def forge(request: bytes) -> bytes | None:
        return forged_refusal(code) if type_of(request) is phase and next(attempts) < 3 else None

    with (
        Router(node_id=0, listen=f"ipc://{tmp_path}/0.sock", key=KEY) as listener,
        Router(
            node_id=1, dial=[listener.address], key=KEY, transport=TamperingTransport(forge)
        ) as dialer,
    ):
        dialer.wait_for_peers(1, timeout_s=DEADLINE_S)
        dialer.emit(Event("e"), (), {})
        assert next(attempts) > 3


def test_a_refusal_that_stays_unverified_fails_with_its_reason(tmp_path: Path) -> None:
    def forge(request: bytes) -> bytes | None:
        return forged_refusal("key") if type_of(request) is FrameType.HELLO else None

    with (
        Router(node_id=0, listen=f"ipc://{tmp_path}/0.sock", key=KEY) as listener,
        Router(
            node_id=1,
            dial=[listener.address],
            key=KEY,
            transport=TamperingTransport(forge),
            start_timeout_s=0.2,
        ) as dialer,
        pytest.raises(HandshakeRefused, match="forged") as refused,
    ):
        dialer.wait_for_peers(1, timeout_s=DEADLINE_S)
    assert refused.value.code == "key" and not refused.value.verified


def test_forged_refusals_in_a_session_only_cause_a_new_connection(tmp_path: Path) -> None:
    forged: list[bytes] = []
    forging = False

    def forge(request: bytes) -> bytes | None:
        if not forging or type_of(request) is not FrameType.POLL or len(forged) >= 2:
            return None
        forged.append(forged_refusal("replaced"))
        return forged[-1]

    with (
        Router(node_id=0, listen=f"ipc://{tmp_path}/0.sock", key=KEY) as listener,
        Router(
            node_id=1,
            dial=[listener.address],
            key=KEY,
            transport=TamperingTransport(forge),
            start_timeout_s=0.2,
        ) as dialer,
    ):
        dialer.subscribe("e", active=True)
        listener.wait_for_peers(1, timeout_s=DEADLINE_S)
        forging = True
        got: list[int] = []
        dialer.attach(lambda name, args, kwargs: got.append(args[0]) if name == "e" else None)
        assert comes_true(lambda: bool(listener.node.subscriptions.subscribers("e")))
        for number in range(5):
            listener.emit(Event("e"), (number,), {})
        assert comes_true(lambda: got == [0, 1, 2, 3, 4])
        assert comes_true(lambda: len(forged) == 2)
        assert comes_true(lambda: dialer.peer_ids() == [0])
        dialer.emit(Event("e"), (), {})


def test_replayed_replies_neither_hide_a_dead_listener_nor_make_the_dialer_spin(
    tmp_path: Path,
) -> None:
    recorded: dict[FrameType, bytes] = {}
    requests: list[float] = []
    dead = False

    def forge(request: bytes) -> bytes | None:
        if not dead:
            return None
        requests.append(time.monotonic())
        return recorded.get(type_of(request), recorded[FrameType.HEARTBEAT])

    def note(request: bytes, reply: bytes) -> None:
        recorded[type_of(request)] = reply

    with (
        Router(node_id=0, listen=f"ipc://{tmp_path}/0.sock", key=KEY) as listener,
        Router(
            node_id=1,
            dial=[listener.address],
            key=KEY,
            transport=TamperingTransport(forge, note),
        ) as dialer,
    ):
        dialer.wait_for_peers(1, timeout_s=DEADLINE_S)
        assert comes_true(lambda: {FrameType.HEARTBEAT, FrameType.POLL} <= recorded.keys())
        dead = True
        assert comes_true(lambda: not dialer.peer_ids(), DEADLINE_S)
        assert comes_true(lambda: len(requests) >= 3, DEADLINE_S)
        # Each failed attempt waits twice as long as the one before it.
        assert len(requests) < 40


class _LateChannel(Channel):
    """A channel whose replies to heartbeats wait, while other bytes may move."""

    def __init__(self, inner: Channel, transport: LateTransport) -> None:
        self._inner = inner
        self._transport = transport
        self.request = inner.request
        self.close = inner.close

    @property
    def n_bytes(self) -> int:
        return next(self._transport.n_bytes) if self._transport.moving else 0

    def send(self, raw: WireBytes, on_reply: OnReply, **options: Any) -> None:
        if type_of(bytes(raw)) is FrameType.HEARTBEAT and self._transport.late:
            self._transport.n_heartbeats += 1
            return
        self._inner.send(raw, on_reply, **options)


class LateTransport(SocketTransport):
    late = moving = False
    n_heartbeats = 0
    n_bytes = itertools.count()

    def dial(self, address: str, **options: Any) -> Channel:
        return _LateChannel(super().dial(address, **options), self)


def test_heartbeats_do_not_wait_for_replies_that_wait_behind_large_frames(tmp_path: Path) -> None:
    options = NodeOptions(heartbeat_s=0.1)
    transport = LateTransport()
    left: list[str] = []
    with (
        Router(node_id=0, listen=f"ipc://{tmp_path}/0.sock", key=KEY) as listener,
        Router(
            node_id=1, dial=[listener.address], key=KEY, transport=transport, options=options
        ) as dialer,
    ):
        dialer.attach(lambda name, args, kwargs: left.append(name) if "left" in name else None)
        dialer.wait_for_peers(1, timeout_s=DEADLINE_S)
        transport.moving = transport.late = True
        assert comes_true(lambda: transport.n_heartbeats >= 6)
        assert not left, "bytes have moved"
        transport.moving = False
        assert comes_true(lambda: bool(left)), "the connection is dead"
        transport.late = False
        assert comes_true(lambda: dialer.peer_ids() == [0])
