"""Frames over plain sockets: in pieces, long, stuck, abandoned, or not frames at all."""

from __future__ import annotations

import contextlib
import random
import time
from pathlib import Path

import pytest

from dmiddleware.errors import TransportError
from dmiddleware.router.transport.interface import Reply
from dmiddleware.router.transport.sockets import SocketTransport
from dmiddleware.router.wire.byte_pieces import BytePieces
from tests.dmiddleware.router.endpoints import unlimited
from tests.dmiddleware.router.request_handlers import echo
from tests.dmiddleware.router.unix_sockets import (
    DEADLINE_S,
    HEAD,
    MAX_BYTES,
    MB,
    BlockingHandler,
    OutcomeRecorder,
    bare_dial,
    bare_listen,
    comes_true,
    dial,
    framed,
    is_hung_up_on,
    listen,
    read_frame,
)

pytestmark = pytest.mark.usefixtures("leaves_nothing")


@pytest.mark.parametrize("n_pieces", [1, 3, 2000])
def test_a_request_in_pieces_arrives_whole(tmp_path: Path, n_pieces: int) -> None:
    pieces: list[bytes | memoryview] = [
        memoryview(bytes([number % 256]) * (number % 7 * 1000)) for number in range(n_pieces)
    ]
    content = BytePieces(pieces)
    with listen(tmp_path), dial(tmp_path) as channel:
        for _ in range(2):
            assert channel.request(content) == bytes(content)


@pytest.mark.parametrize("step", [1, 27, 28, 29, 1000, 16_384, 65_536, 400_000])
def test_frames_may_arrive_in_arbitrary_pieces(tmp_path: Path, step: int) -> None:
    served: list[bytes] = []
    sizes = [0, 1, 30, 0, 5] if step == 1 else [0, 1, 16_384, 16_385, 0, 70_000, 3, 600_000, 5]
    contents = [random.Random(size).randbytes(size) for size in sizes]
    stream = b"".join(framed(1, number, content) for number, content in enumerate(contents))
    with (
        listen(tmp_path, lambda raw, connection, reply: served.append(bytes(raw))),
        bare_dial(tmp_path) as made,
    ):
        for begin in range(0, len(stream), step):
            made.sendall(stream[begin : begin + step])
            if step < 1000:
                time.sleep(0 if begin % 97 else 0.001)
        assert comes_true(lambda: len(served) == len(contents))
    assert served == contents


def test_large_frames_travel_both_ways_at_once(tmp_path: Path) -> None:
    content = random.Random(0).randbytes(8 * MB)
    replies = OutcomeRecorder()
    with listen(tmp_path), dial(tmp_path) as channel:
        for _ in range(8):
            channel.send(content, replies, timeout_s=None)
        assert all(answer == content for answer in replies.wait(8))


def test_a_slow_listener_does_not_block_the_sender(tmp_path: Path) -> None:
    held, replies = BlockingHandler(), OutcomeRecorder()
    with listen(tmp_path, held), dial(tmp_path) as channel:
        for number in range(40):
            channel.send(BytePieces([b"%8d" % number, bytes(MB)]), replies, timeout_s=None)
        assert held.served == replies.got == []
        held.release.set()
        got = replies.wait(40)
    assert [bytes(one)[:8] for one in got if isinstance(one, bytes)] == held.served
    assert held.served == [b"%8d" % number for number in range(40)]


def test_a_dialer_that_does_not_read_blocks_no_replies_and_is_not_served_forever(
    tmp_path: Path,
) -> None:
    served: list[int] = []

    def serve(raw: memoryview, connection: int, reply: Reply) -> None:
        listener.trust(connection)
        served.append(len(raw))
        reply(bytes(4 * MB))

    with (
        listen(tmp_path, serve) as listener,
        bare_dial(tmp_path) as made,
        dial(tmp_path) as other,
    ):
        made.sendall(b"".join(framed(1, number, b"") for number in range(40)))
        assert comes_true(lambda: len(served) >= 5)
        assert len(other.request(b"")) == 4 * MB
        assert not comes_true(lambda: len(served) > 12, within_s=0.3)
        for number in range(40):
            assert read_frame(made, 2) == (number, bytes(4 * MB))
    assert len(served) == 41


@pytest.mark.parametrize(
    "sent",
    [
        b"GET / HTTP/1.1\r\nHost: nowhere\r\n\r\n",
        random.Random(1).randbytes(100_000),
        HEAD.pack(b"DMWX", 1, 5, 1, 5) + b"magic",
        HEAD.pack(b"DMWU", 2, 4, 1, 4) + b"kind",
        HEAD.pack(b"DMWU", 1, 0, 1, MAX_BYTES + 1),
        HEAD.pack(b"DMWU", 1, 0, 1, 2**63),
        HEAD.pack(b"DMWU", 1, 0, 1, 2**64 - 1),
    ],
    ids=["text", "random", "another magic", "another kind", "too long", "2^63", "2^64"],
)
def test_a_connection_that_sends_garbage_is_closed(tmp_path: Path, sent: bytes) -> None:
    served: list[int] = []
    gone: list[int] = []

    def serve(raw: memoryview, connection: int, reply: Reply) -> None:
        served.append(connection)
        reply(b"")

    with listen(tmp_path, serve, gone.append), dial(tmp_path) as good, bare_dial(tmp_path) as bad:
        with contextlib.suppress(ConnectionError):
            bad.sendall(sent)
        assert is_hung_up_on(bad)
        assert comes_true(lambda: len(gone) == 1)
        good.request(b"?")
        assert served != gone
        assert len(served) == 1


@pytest.mark.parametrize(
    "sent",
    [b"?" * 100, HEAD.pack(b"DMWU", 1, 0, 1, 0), HEAD.pack(b"DMWU", 2, 0, 1, MAX_BYTES + 1)],
    ids=["garbage", "another kind", "too long"],
)
def test_a_channel_without_a_reply_breaks(tmp_path: Path, sent: bytes) -> None:
    with bare_listen(tmp_path) as listening, dial(tmp_path) as channel:
        accepted, _ = listening.accept()
        with accepted:
            replies = OutcomeRecorder()
            channel.send(b"?", replies, timeout_s=None)
            accepted.sendall(sent)
            assert "not a reply, or a reply that is too long" in str(replies.wait(1)[0])
            with pytest.raises(TransportError, match="not a reply, or a reply that is too long"):
                channel.request(b"again")


def test_deadlines_hold_while_a_reply_is_stuck_half_way(tmp_path: Path) -> None:
    with bare_listen(tmp_path) as listening, dial(tmp_path, reply_timeout_s=0.2) as channel:
        accepted, _ = listening.accept()
        with accepted:
            replies = OutcomeRecorder()
            channel.send(b"?", replies, timeout_s=0.2)
            channel.send(b"?", replies, timeout_s=0.2)
            stuck = framed(2, 1, bytes(MB))
            accepted.sendall(stuck[:100_000])
            assert all(isinstance(answer, TransportError) for answer in replies.wait(2))
            channel.send(b"?", replies, timeout_s=0.2)
            accepted.sendall(stuck[100_000:] + framed(2, 3, b"ok"))
            assert replies.wait(3)[2:] == [b"ok"]


def test_an_abandoned_request_is_not_sent(tmp_path: Path) -> None:
    with bare_listen(tmp_path) as listening, dial(tmp_path, reply_timeout_s=0.2) as channel:
        accepted, _ = listening.accept()
        with accepted:
            accepted.settimeout(DEADLINE_S)
            replies = OutcomeRecorder()
            for _ in range(30):
                channel.send(bytes(MB), replies, timeout_s=0.2)
            assert all(isinstance(answer, TransportError) for answer in replies.wait(30))
            channel.send(b"last", replies, timeout_s=0.2)
            numbers: list[int] = []
            while not numbers or numbers[-1] < 31:
                number, content = read_frame(accepted)
                numbers.append(number)
                assert content in (bytes(MB), b"last")
    assert numbers == [*range(1, len(numbers)), 31]
    assert len(numbers) < 20


@pytest.mark.parametrize(
    ("bound", "dialed"),
    [
        ("tcp://[::1]:0", "tcp://[::1]"),
        ("tcp://0.0.0.0:0", "tcp://127.0.0.1"),
        ("tcp://[::]:0", "tcp://127.0.0.1"),
        ("tcp://[::]:0", "tcp://[::1]"),
        ("tcp://localhost:0", "tcp://localhost"),
    ],
)
def test_a_listener_may_be_bound_to_any_address_of_the_host(bound: str, dialed: str) -> None:
    listener = SocketTransport().listen(
        bound, echo, on_disconnect=lambda _: None, limits=unlimited(MAX_BYTES)
    )
    with contextlib.closing(listener):
        host, _, port = listener.address.rpartition(":")
        assert host == bound.removesuffix(":0") and int(port) > 0
        channel = SocketTransport().dial(
            f"{dialed}:{port}", connect_timeout_s=5, reply_timeout_s=5, max_frame_bytes=MAX_BYTES
        )
        with contextlib.closing(channel):
            assert channel.request(b"hello") == b"hello"
