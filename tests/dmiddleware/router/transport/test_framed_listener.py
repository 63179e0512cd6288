"""What strangers may cost a listener, over nng's streams and bare sockets."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from dmiddleware.errors import FrameError, RouterError
from dmiddleware.router.protocol.strangers import BURST, MAX_PER_S, Strangers
from dmiddleware.router.transport.framed_connection import Callbacks, FramedConnection
from dmiddleware.router.transport.framed_listener import FramedListener
from dmiddleware.router.transport.nng_stream import NngStreamTransport
from dmiddleware.router.wire.stream_frames import FrameWriter
from dmiddleware.testing import FakeClock
from dmiddleware.testing.stream_network import StreamNetwork
from tests.dmiddleware.router.process_resources import is_hung_up_on, nothing_left
from tests.dmiddleware.router.stream_ends import DEADLINE_S, start_nng
from tests.waiting import wait_until

MAX_BYTES = 1 << 20


def framed(*frames: bytes) -> bytes:
    writer, raw = FrameWriter(), bytearray()
    for frame in frames:
        writer.put(frame)
    while pieces := writer.next():
        raw += b"".join(pieces)
    return bytes(raw)


class Server:
    """A listener at which "hello" is a valid hello and "key" authenticates."""

    def __init__(self, path: Path) -> None:
        self.clock = FakeClock()
        self.path = path
        self.frames: list[bytes] = []
        self.errors: list[RouterError] = []
        self.listener = FramedListener(
            NngStreamTransport(),
            f"ipc://{path}",
            on_connection=self._on_connection,
            now=lambda: self.clock.now() + time.monotonic(),
            max_stranger_bytes=100,
            max_frame_bytes=MAX_BYTES,
            strangers=Strangers(most=20, seed=1),
        )

    def _on_connection(self, connection: FramedConnection) -> Callbacks:
        return Callbacks(partial(self._on_frame, connection), self.errors.append)

    def _on_frame(self, connection: FramedConnection, frame: memoryview) -> None:
        content = bytes(frame)
        if content == b"hello" and content in self.frames:
            raise FrameError("got a second hello")
        self.frames.append(content)
        if content == b"hello":
            self.listener.note_hello(connection)
            connection.put(b"challenge")
        elif content == b"key":
            self.listener.trust(connection)
            connection.put(b"welcome")
        else:
            connection.put(b"%d" % len(content))
        connection.flush()

    @contextlib.contextmanager
    def stranger(self) -> Iterator[socket.socket]:
        with socket.socket(socket.AF_UNIX) as made:
            made.settimeout(DEADLINE_S)
            wait_until(lambda: self._connects(made), "room in the system's queue")
            yield made

    def _connects(self, made: socket.socket) -> bool:
        # The system's queue may be full for a moment.
        with contextlib.suppress(BlockingIOError):
            made.connect(str(self.path))
            return True
        return False


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    start_nng()
    with nothing_left():
        made = Server(tmp_path / "s")
        yield made
        made.listener.close()
        made.listener.close()


def replies(made: socket.socket, expected: bytes) -> bool:
    raw = framed(expected)
    received = b""
    while len(received) < len(raw):
        part = made.recv(len(raw) - len(received))
        if not part:
            return False
        received += part
    return received == raw


def test_a_peer_with_the_key_may_send_long_frames(server: Server) -> None:
    with server.stranger() as peer:
        peer.sendall(framed(b"hello"))
        assert replies(peer, b"challenge")
        peer.sendall(framed(b"key"))
        assert replies(peer, b"welcome")
        peer.sendall(framed(bytes(MAX_BYTES), b"and more", b"and more"))
        assert replies(peer, b"%d" % MAX_BYTES)
        server.clock.advance(100.0)
        server.listener.close_late()
        peer.sendall(framed(b"still here"))
        assert replies(peer, b"8")


@pytest.mark.parametrize(
    "raw", [framed(bytes(101)), framed(b"hello", b"hello", b"hello"), b"GET / HTTP/1.1\r\n\r\n"]
)
def test_a_stranger_that_sends_too_much_or_garbage_is_hung_up_on(
    server: Server, raw: bytes
) -> None:
    with server.stranger() as stranger:
        stranger.sendall(raw)
        with contextlib.suppress(ConnectionError):
            while stranger.recv(100):
                pass
        wait_until(lambda: len(server.errors) == 1, "the end of the connection")
        assert len(server.frames) <= 1


def test_a_stranger_that_says_nothing_is_hung_up_on(server: Server) -> None:
    with server.stranger() as silent, server.stranger() as greeting:
        greeting.sendall(framed(b"hello"))
        assert replies(greeting, b"challenge")
        server.clock.advance(1.9)
        server.listener.close_late()
        assert not server.errors
        server.clock.advance(0.2)
        server.listener.close_late()
        assert is_hung_up_on(silent) and is_hung_up_on(greeting)
        wait_until(lambda: len(server.errors) == 2, "the ends of two connections")


def test_a_peer_joins_among_hundreds_of_silent_connections(server: Server) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(200):
            stack.enter_context(server.stranger())
        wait_until(lambda: len(server.errors) == 180, "180 strangers to be refused")
        peer = stack.enter_context(server.stranger())
        peer.sendall(framed(b"hello"))
        assert replies(peer, b"challenge")
        # More of them do not push it out.
        for _ in range(100):
            stack.enter_context(server.stranger())
        peer.sendall(framed(b"key"))
        assert replies(peer, b"welcome")


def test_peers_far_away_join_while_others_connect_all_the_time(server: Server) -> None:
    is_over = threading.Event()
    n_attempts = 0

    def attack() -> None:
        while not is_over.is_set():
            with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as made:
                made.settimeout(DEADLINE_S)
                made.connect(str(server.path))
                made.recv(1)

    def joins() -> bool:
        nonlocal n_attempts
        n_attempts += 1
        with contextlib.suppress(OSError), server.stranger() as peer:
            peer.sendall(framed(b"hello"))
            if not replies(peer, b"challenge"):
                return False
            # It is so far away that others are refused in the meantime.
            n_refused = len(server.errors) + 8
            wait_until(lambda: len(server.errors) >= n_refused, "eight refusals")
            peer.sendall(framed(b"key"))
            return replies(peer, b"welcome")
        return False

    attackers = [threading.Thread(target=attack) for _ in range(25)]
    for attacker in attackers:
        attacker.start()
    try:
        wait_until(joins, lambda: f"a peer to join; {n_attempts} attempts have failed")
    finally:
        is_over.set()
        # The last of them wait for something to be sent.
        server.listener.close()
        for attacker in attackers:
            attacker.join(DEADLINE_S)


@pytest.mark.parametrize(
    ("scheme", "raw", "cost"),
    [
        ("tcp", framed(b"hello"), 1),
        ("tls+tcp", framed(b"hello"), 3),
        ("tls+tcp", b"GET / HTTP/1.1\r\n\r\n", 3),
        ("tls+tcp", b"", 3),
        ("tls+tcp", framed(b"hello", b"key"), 1),
    ],
    ids=["without TLS", "hello", "garbage", "closed at once", "authenticated"],
)
def test_a_stranger_counts_several_times_after_a_tls_handshake(
    scheme: str, raw: bytes, cost: int
) -> None:
    network, address = StreamNetwork(), f"{scheme}://here:1"
    strangers: Strangers[FramedConnection] = Strangers(extra=2 if scheme == "tls+tcp" else 0)
    n_done = 0

    def on_connection(connection: FramedConnection) -> Callbacks:
        return Callbacks(partial(on_frame, connection), lambda error: note())

    def on_frame(connection: FramedConnection, frame: memoryview) -> None:
        if frame == b"hello":
            listener.note_hello(connection)
        else:
            listener.trust(connection)
        if frame == raw[-len(frame) :]:
            note()

    def note() -> None:
        nonlocal n_done
        n_done += 1

    here, there = network.transport("here"), network.transport("there")
    listener = FramedListener(
        here,
        address,
        on_connection=on_connection,
        now=lambda: 0.0,
        max_stranger_bytes=100,
        max_frame_bytes=MAX_BYTES,
        strangers=strangers,
    )
    n_connections = BURST // 2
    for _ in range(n_connections):
        stream = there.dial(address, timeout_s=DEADLINE_S)
        if raw:
            stream.send([raw], lambda error: None)
        else:
            stream.close()
    wait_until(lambda: n_done == n_connections, "all strangers to be counted")
    expected = max(0.0, (cost * n_connections - BURST) / MAX_PER_S)
    assert strangers.pause_s(0.0) == pytest.approx(expected)
    assert here.close(timeout_s=DEADLINE_S) and there.close(timeout_s=DEADLINE_S)
