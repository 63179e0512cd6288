"""Frames over every kind of stream."""

from __future__ import annotations

import logging
import random
import socket
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from dmiddleware.errors import FrameError, RouterError
from dmiddleware.router.transport.framed_connection import Callbacks, FramedConnection
from dmiddleware.router.transport.nng_stream import NngStreamTransport
from dmiddleware.router.transport.stream import Stream
from dmiddleware.router.wire.stream_frames import CHUNK_BYTES
from tests.dmiddleware.router.stream_ends import DEADLINE_S, StreamEndpoints
from tests.waiting import wait_until

MAX_BYTES = 32 << 20


class Peer:
    """One side of a framed connection; it keeps the frames."""

    def __init__(
        self,
        stream: Stream,
        on_frame: Callable[[Peer, bytes], None] = lambda peer, frame: None,
        *,
        max_frame_bytes: int = MAX_BYTES,
    ) -> None:
        self.frames: list[bytes] = []
        self.errors: list[RouterError] = []
        self._call = on_frame
        self._lock = threading.Lock()
        self.connection = FramedConnection(stream, max_frame_bytes=max_frame_bytes)
        self.connection.start(Callbacks(self._on_frame, self.errors.append))

    def send(self, frame: bytes, *, urgent: bool = False) -> None:
        with self._lock:
            self.connection.put(frame, urgent=urgent)
        self.connection.flush()

    def _on_frame(self, frame: memoryview) -> None:
        self.frames.append(bytes(frame))
        self._call(self, self.frames[-1])

    def expect(self, n: int) -> list[bytes]:
        wait_until(lambda: len(self.frames) >= n, lambda: f"{n} frames, not {len(self.frames)}")
        return self.frames

    def end(self) -> RouterError:
        wait_until(lambda: bool(self.errors), "the end of the connection")
        return self.errors[0]


def test_both_sides_send_frames_of_all_lengths(endpoints: StreamEndpoints) -> None:
    rng = random.Random(1)
    frames = [rng.randbytes(rng.choice((0, 10, 5000, 300_000, 2_000_000))) for _ in range(40)]
    accepted: list[Peer] = []
    with endpoints.listening(lambda stream: accepted.append(Peer(stream))) as listener:
        dialer = Peer(endpoints.dial(listener.address))
        for frame in frames:
            dialer.send(frame)
        wait_until(lambda: bool(accepted), "the connection")
        for frame in reversed(frames):
            accepted[0].send(frame)
        assert accepted[0].expect(40) == frames
        assert dialer.expect(40) == frames[::-1]
        assert dialer.connection.unsent_bytes == 0
        dialer.connection.close()
        accepted[0].end()
        assert "closed" in str(dialer.end())


def test_many_threads_send_at_once(endpoints: StreamEndpoints) -> None:
    accepted: list[Peer] = []
    with endpoints.listening(lambda stream: accepted.append(Peer(stream))) as listener:
        dialer = Peer(endpoints.dial(listener.address))

        def send(name: int) -> None:
            for number in range(100):
                dialer.send(b"%d %d" % (name, number) + bytes(number * 300))

        threads = [threading.Thread(target=send, args=(name,)) for name in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(DEADLINE_S)
        wait_until(lambda: bool(accepted), "the connection")
        heads = [frame.rstrip(b"\0").split() for frame in accepted[0].expect(400)]
        for name in range(4):
            numbers = [int(number) for sender, number in heads if int(sender) == name]
            assert numbers == list(range(100))


def test_urgent_frames_overtake_large_ones(endpoints: StreamEndpoints) -> None:
    accepted: list[Peer] = []
    with endpoints.listening(lambda stream: accepted.append(Peer(stream))) as listener:
        dialer = Peer(endpoints.dial(listener.address))
        for _ in range(4):
            dialer.send(bytes(30 * CHUNK_BYTES))
        dialer.send(b"heartbeat", urgent=True)
        wait_until(lambda: bool(accepted), "the connection")
        assert b"heartbeat" in accepted[0].expect(5)[:3]


def test_frames_that_are_too_long_or_are_none_end_the_connection(
    endpoints: StreamEndpoints,
) -> None:
    accepted: list[Peer] = []

    def accept(stream: Stream) -> None:
        accepted.append(Peer(stream, max_frame_bytes=4096))

    with endpoints.listening(accept) as listener:
        dialer = Peer(endpoints.dial(listener.address))
        dialer.send(b"fine")
        dialer.send(bytes(4097))
        dialer.end()
        assert isinstance(accepted[0].end(), FrameError)
        assert accepted[0].frames == [b"fine"]
        stream = endpoints.dial(listener.address)
        stream.send([b"GET / HTTP/1.1\r\n\r\n"], lambda error: None)
        wait_until(lambda: len(accepted) == 2, "both connections")
        assert isinstance(accepted[1].end(), FrameError)


def test_a_peer_that_was_trusted_may_send_longer_frames(endpoints: StreamEndpoints) -> None:
    accepted: list[Peer] = []

    def trust(peer: Peer, frame: bytes) -> None:
        if frame == b"secret":
            peer.connection.allow(MAX_BYTES)
            peer.send(b"welcome")

    with endpoints.listening(
        lambda stream: accepted.append(Peer(stream, trust, max_frame_bytes=4096))
    ) as listener:
        dialer = Peer(endpoints.dial(listener.address))
        dialer.send(b"secret")
        dialer.expect(1)
        dialer.send(bytes(1_000_000))
        assert accepted[0].expect(2)[1] == bytes(1_000_000)


def test_closing_while_processing_a_frame_drops_the_next_ones(endpoints: StreamEndpoints) -> None:
    accepted: list[Peer] = []

    def accept(stream: Stream) -> None:
        accepted.append(Peer(stream, lambda peer, frame: peer.connection.close()))

    with endpoints.listening(accept) as listener:
        dialer = Peer(endpoints.dial(listener.address))
        for _ in range(10):
            dialer.send(b"hello")
        dialer.end()
        accepted[0].end()
        assert accepted[0].frames == [b"hello"]
        accepted[0].connection.close()
        dialer.send(b"too late")


def test_a_frame_whose_processing_fails_ends_only_its_connection(
    endpoints: StreamEndpoints, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(peer: Peer, frame: bytes) -> None:
        raise ZeroDivisionError

    accepted: list[Peer] = []
    with (
        endpoints.listening(lambda stream: accepted.append(Peer(stream, fail))) as listener,
        caplog.at_level(logging.CRITICAL),
    ):
        for number in range(3):
            dialer = Peer(endpoints.dial(listener.address))
            dialer.send(b"hello")
            dialer.end()
            assert "ZeroDivisionError" in str(accepted[number].end())


def test_a_peer_that_does_not_read_costs_a_known_amount(tmp_path: Path) -> None:
    accepted: list[Peer] = []
    endpoints = StreamEndpoints(f"ipc://{tmp_path}/s", NngStreamTransport(), NngStreamTransport())
    with (
        endpoints.listening(lambda stream: accepted.append(Peer(stream))),
        socket.socket(socket.AF_UNIX) as stranger,
    ):
        stranger.connect(f"{tmp_path}/s")
        wait_until(lambda: bool(accepted), "the connection")
        for _ in range(100):
            accepted[0].send(bytes(100_000))
        unsent = accepted[0].connection.unsent_bytes
        assert 5_000_000 < unsent <= 100 * (100_000 + 1024)
        accepted[0].connection.close()
        accepted[0].end()
        assert accepted[0].connection.unsent_bytes == 0
