"""The connections of a router: someone on the way forges and replays what the listener says, peers
say nothing, and frames cannot be processed."""

from __future__ import annotations

import contextlib
import itertools
import socket
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from dmiddleware.errors import HandshakeRefused, RouterError
from dmiddleware.pipeline import Event
from dmiddleware.router import NodeOptions, Router
from dmiddleware.router.protocol.peer import PeerConnection
from dmiddleware.router.runtime import connections
from dmiddleware.router.transport.nng_stream import NngStreamTransport
from dmiddleware.router.transport.stream import OnBytes, Stream
from dmiddleware.router.wire.frame import FrameType, type_of
from dmiddleware.router.wire.stream_frames import CHUNK_BYTES
from tests.accepting import accepting
from tests.dmiddleware.router.tampering import Forge, Note, TamperingTransport, forged_refusal
from tests.router_state import locked_node, n_refused
from tests.waiting import wait_until

KEY = bytes(range(32))
DEADLINE_S = 20.0


@contextlib.contextmanager
def tampered(
    folder: Path, forge: Forge, note: Note = lambda frame: None, **options: Any
) -> Iterator[tuple[Router, Router]]:
    """Yield a listener, and a dialer with options whose frames pass through someone else."""
    with (
        Router(node_id=0, listen=f"ipc://{folder}/0.sock", key=KEY) as listener,
        Router(
            node_id=1,
            dial=[listener.address],
            key=KEY,
            transport=TamperingTransport(forge, note),
            **options,
        ) as dialer,
    ):
        yield listener, dialer


@pytest.mark.parametrize("code", ["replaced", "run", "key", "node_id_taken", "version"])
@pytest.mark.parametrize("phase", [FrameType.HELLO, FrameType.AUTH])
def test_forged_refusals_only_delay_a_dialer(tmp_path: Path, code: str, phase: FrameType) -> None:
    attempts = itertools.count()

    def forge(frame: bytes) -> bytes | None:
        return forged_refusal(code) if type_of(frame) is phase and next(attempts) < 3 else None

    with tampered(tmp_path, forge) as (_, dialer):
        dialer.wait_for_peers(1, timeout_s=DEADLINE_S)
        dialer.emit(Event("e"), (), {})
        assert next(attempts) > 3


def test_a_refusal_that_stays_unverified_fails_with_its_reason(tmp_path: Path) -> None:
    def forge(frame: bytes) -> bytes | None:
        return forged_refusal("key") if type_of(frame) is FrameType.HELLO else None

    with (
        tampered(tmp_path, forge, start_timeout_s=0.2) as (_, dialer),
        pytest.raises(HandshakeRefused, match="forged") as refused,
    ):
        dialer.wait_for_peers(1, timeout_s=DEADLINE_S)
    assert refused.value.code == "key" and not refused.value.verified


def test_the_text_of_a_forged_refusal_does_not_reach_the_log_raw(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def forge(frame: bytes) -> bytes | None:
        hello = type_of(frame) is FrameType.HELLO
        return forged_refusal("key", "first\nERROR second \x1b[31m\u202e") if hello else None

    with (
        tampered(tmp_path, forge, start_timeout_s=0.2) as (_, dialer),
        pytest.raises(HandshakeRefused) as refused,
    ):
        dialer.wait_for_peers(1, timeout_s=DEADLINE_S)
    (warning,) = [one for one in caplog.messages if "refused this node" in one]
    for text in (warning, str(refused.value)):
        assert "first" in text and "second" in text
        assert text.isprintable()


def test_forged_refusals_in_a_session_only_cause_a_new_connection(tmp_path: Path) -> None:
    forged: list[bytes] = []
    forging = False

    def forge(frame: bytes) -> bytes | None:
        if not forging or type_of(frame) is not FrameType.HEARTBEAT or len(forged) >= 2:
            return None
        forged.append(forged_refusal("replaced"))
        return forged[-1]

    with tampered(tmp_path, forge, start_timeout_s=0.2) as (listener, dialer):
        dialer.subscribe("e", active=True)
        listener.wait_for_peers(1, timeout_s=DEADLINE_S)
        forging = True
        got: list[int] = []
        dialer.attach(
            accepting(
                lambda name, args, kwargs: got.append(args[0]) if name == "e" else None, waits=True
            )
        )
        wait_until(lambda: listener.subscribers("e") == [1], "the subscription")
        for number in range(5):
            listener.emit(Event("e"), (number,), {})
        wait_until(lambda: got == [0, 1, 2, 3, 4], "five events")
        wait_until(lambda: len(forged) == 2, "both forged frames")
        wait_until(lambda: dialer.peer_ids() == [0], "the connection")
        dialer.emit(Event("e"), (), {})


def test_replayed_answers_neither_hide_a_dead_listener_nor_make_the_dialer_spin(
    tmp_path: Path,
) -> None:
    recorded: dict[FrameType, bytes] = {}
    hellos: list[float] = []
    dead = False
    answers = {
        FrameType.HELLO: FrameType.CHALLENGE,
        FrameType.AUTH: FrameType.WELCOME,
    }

    def forge(frame: bytes) -> bytes | None:
        kind = type_of(frame)
        if not dead:
            return None
        if kind is FrameType.HELLO:
            hellos.append(time.monotonic())
        return recorded[answers.get(kind, FrameType.HEARTBEAT)]

    def note(frame: bytes) -> None:
        recorded[type_of(frame)] = frame

    with tampered(tmp_path, forge, note) as (_, dialer):
        dialer.wait_for_peers(1, timeout_s=DEADLINE_S)
        wait_until(lambda: FrameType.HEARTBEAT in recorded, "a heartbeat")
        dead = True
        wait_until(lambda: not dialer.peer_ids(), "the dead listener to count as lost")
        wait_until(lambda: len(hellos) >= 4, "four attempts")
        # Each failed attempt waits twice as long as the one before it.
        assert hellos[3] - hellos[0] > 0.3
        assert not dialer.peer_ids()


class TricklingTransport(NngStreamTransport):
    """Replaces what dialed connections receive by a large frame that is never complete.

    Attributes:
        trickles: whether it does so.
        swallows: whether nothing arrives any more.
        n_calls: how often something of the large frame has arrived.
    """

    def __init__(self) -> None:
        super().__init__()
        self.trickles = self.swallows = False
        self.n_calls = 0
        self.head = struct.pack("<4sIQ", b"DMWS", CHUNK_BYTES, 16 << 20)

    def dial(self, address: str, *, timeout_s: float) -> Stream:
        return _TricklingStream(super().dial(address, timeout_s=timeout_s), self)


class _TricklingStream:
    def __init__(self, inner: Stream, transport: TricklingTransport) -> None:
        self._inner = inner
        self._transport = transport
        self.send = inner.send
        self.close = inner.close

    def receive(self, targets: Sequence[memoryview], on_bytes: OnBytes) -> None:
        def replace(outcome: int | RouterError) -> None:
            transport = self._transport
            if isinstance(outcome, int) and transport.swallows:
                self.receive(targets, on_bytes)
                return
            if isinstance(outcome, int) and transport.trickles:
                transport.n_calls += 1
                targets[0][:outcome] = transport.head.ljust(outcome, b"\0")[:outcome]
                transport.head = b""
            on_bytes(outcome)

        self._inner.receive(targets, replace)


def test_a_silent_peer_stays_connected_while_its_connection_moves_bytes(tmp_path: Path) -> None:
    transport = TricklingTransport()
    left: list[str] = []
    options = NodeOptions(heartbeat_s=0.1)
    with (
        Router(node_id=0, listen=f"ipc://{tmp_path}/0.sock", key=KEY, options=options) as listener,
        Router(
            node_id=1, dial=[listener.address], key=KEY, transport=transport, options=options
        ) as dialer,
    ):
        dialer.attach(
            accepting(
                lambda name, args, kwargs: left.append(name) if "left" in name else None, waits=True
            )
        )
        dialer.wait_for_peers(1, timeout_s=DEADLINE_S)
        transport.trickles = True
        wait_until(lambda: transport.n_calls >= 8, "eight parts of the frame")
        assert not left, "bytes have moved"
        transport.swallows = True
        wait_until(lambda: bool(left), "the dead connection to be noticed")
        transport.trickles = transport.swallows = False
        wait_until(lambda: dialer.peer_ids() == [0], "the connection")


@contextlib.contextmanager
def silent_listener(tmp_path: Path) -> Iterator[tuple[str, list[socket.socket]]]:
    """Accept connections, and say nothing."""
    accepted: list[socket.socket] = []
    with contextlib.ExitStack() as stack, socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "silent"))
        listener.listen()

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    accepted.append(stack.enter_context(listener.accept()[0]))

        thread = threading.Thread(target=accept)
        thread.start()
        yield f"ipc://{tmp_path}/silent", accepted
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(DEADLINE_S)


def test_a_listener_that_says_nothing_is_dialed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "HANDSHAKE_S", 0.1)
    with (
        silent_listener(tmp_path) as (address, accepted),
        Router(node_id=1, dial=[address], key=KEY),
    ):
        wait_until(lambda: len(accepted) >= 3, "three attempts")


def test_closing_does_not_wait_for_peers_that_do_not_answer(tmp_path: Path) -> None:
    with silent_listener(tmp_path) as (address, accepted):
        router = Router(node_id=1, dial=[address, "tcp://127.0.0.1:1"], key=KEY)
        router.start()
        wait_until(lambda: bool(accepted), "the first attempt")
        started_at = time.monotonic()
        assert router.close() == {}
        assert time.monotonic() - started_at < 2.0


@pytest.mark.parametrize("listener_fails", [False, True])
def test_a_frame_whose_processing_fails_costs_one_connection(
    tmp_path: Path,
    listener_fails: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with (
        Router(node_id=0, listen=f"ipc://{tmp_path}/0.sock", key=KEY) as listener,
        Router(node_id=1, dial=[listener.address], key=KEY) as dialer,
    ):
        failing, other = (listener, dialer) if listener_fails else (dialer, listener)
        got: list[int] = []
        failing.subscribe("e", active=True)
        failing.attach(
            accepting(
                lambda name, args, kwargs: got.append(args[0]) if name == "e" else None, waits=True
            )
        )
        other.wait_for_peers(1, timeout_s=DEADLINE_S, events=["e"])
        with locked_node(failing) as node:
            on_frame = node.on_frame
        failures = itertools.count()

        def fail_once(
            connection: PeerConnection, raw: memoryview, *args: Any, **options: Any
        ) -> FrameType:
            if type_of(raw) is FrameType.DATA and not next(failures):
                raise KeyError("a defect")
            return on_frame(connection, raw, *args, **options)

        monkeypatch.setattr(node, "on_frame", fail_once)
        for number in range(3):
            other.emit(Event("e"), (number,), {})
        wait_until(lambda: got == [0, 1, 2], "three events in order, which needs the lock")
        assert "KeyError" in caplog.text
        assert node.n_sessions >= 2


def test_threads_that_emit_at_once_keep_the_frames_of_a_connection_in_order(
    tmp_path: Path,
) -> None:
    with (
        Router(node_id=0, listen=f"ipc://{tmp_path}/0.sock", key=KEY) as listener,
        Router(node_id=1, dial=[listener.address], key=KEY) as dialer,
    ):
        got: list[tuple[int, int]] = []
        listener.subscribe("e", active=True)
        listener.attach(
            accepting(
                lambda name, args, kwargs: got.append(args) if name == "e" else None, waits=True
            )
        )
        dialer.wait_for_peers(1, timeout_s=DEADLINE_S, events=["e"])

        def emit(thread: int) -> None:
            for number in range(200):
                dialer.emit(Event("e"), (thread, number), {})

        emitting = [threading.Thread(target=emit, args=(number,)) for number in range(4)]
        for thread in emitting:
            thread.start()
        for thread in emitting:
            thread.join(DEADLINE_S)
        wait_until(lambda: len(got) == 800, "800 events")
        for sender in range(4):
            assert [number for thread, number in got if thread == sender] == list(range(200))
        assert dialer.peer_traffic()[0].resent_frames == 0
        assert n_refused(listener) == 0
