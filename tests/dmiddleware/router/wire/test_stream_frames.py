"""Frames in a stream of bytes."""

from __future__ import annotations

import random
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dmiddleware.errors import FrameError
from dmiddleware.router.wire.byte_pieces import BytePieces, WireBytes
from dmiddleware.router.wire.stream_frames import (
    CHUNK_BYTES,
    HEAD_BYTES,
    SMALL_BYTES,
    FrameReader,
    FrameWriter,
)
from dmiddleware.testing.stream_network import fill

MAX_BYTES = 4 * CHUNK_BYTES
SIZES = (0, 1, 1000, SMALL_BYTES, SMALL_BYTES + 1, CHUNK_BYTES, 2 * CHUNK_BYTES + 5)


def head(size: int, total: int, magic: bytes = b"DMWS") -> bytes:
    return struct.pack("<4sIQ", magic, size, total)


def feed(reader: FrameReader, raw: bytes, rng: random.Random | None = None) -> list[bytes]:
    """Receive bytes, a random number at a time; return the frames."""
    frames: list[bytes] = []
    start = 0
    while start < len(raw):
        room = sum(map(len, reader.targets))
        wanted = room if rng is None else rng.choice((1, HEAD_BYTES - 1, 5000, room))
        n_bytes = fill(reader.targets, raw[start : start + wanted])
        assert n_bytes
        start += n_bytes
        frames += map(bytes, reader.add(n_bytes))
    return frames


def drain(writer: FrameWriter) -> bytes:
    raw = bytearray()
    while pieces := writer.next():
        raw += b"".join(pieces)
    return bytes(raw)


@settings(deadline=None)
@given(st.lists(st.sampled_from(SIZES), max_size=6), st.integers(0, 1000))
def test_frames_arrive_whole_and_in_order_however_they_are_cut(sizes: list[int], seed: int) -> None:
    rng = random.Random(seed)
    frames = [rng.randbytes(size) for size in sizes]
    writer, reader = FrameWriter(), FrameReader(MAX_BYTES)
    for frame in frames:
        cut = rng.randint(0, len(frame))
        writer.put(BytePieces([frame[:cut], frame[cut:]]) if rng.random() < 0.5 else frame)
    assert feed(reader, drain(writer), rng) == frames
    assert writer.unsent_bytes == 0


def test_large_frames_can_be_replaced_when_they_are_sent() -> None:
    asked: list[bytes] = []

    def replaced(frame: WireBytes) -> WireBytes:
        asked.append(bytes(frame))
        return b"ticket" if bytes(frame)[:1] == b"t" else frame

    writer, reader = FrameWriter(), FrameReader(MAX_BYTES)
    writer.replace = replaced
    tickets = [b"t" * CHUNK_BYTES, b"t" * (SMALL_BYTES + 1)]
    frames = [tickets[0], b"t small", b"as it is" * SMALL_BYTES, tickets[1], b"last"]
    for frame in frames:
        writer.put(frame)
    assert asked == [], "they are replaced before they are sent"
    first = b"".join(writer.next())
    assert asked == frames[:1], "the next one delays the first"
    sent = [b"ticket", frames[1], frames[2], b"ticket", frames[4]]
    assert feed(reader, first + drain(writer)) == sent
    assert asked == [frames[0], frames[2], frames[3]]
    assert writer.unsent_bytes == 0


def test_an_urgent_frame_waits_for_one_chunk_only() -> None:
    writer, reader = FrameWriter(), FrameReader(MAX_BYTES)
    large = bytes(3 * CHUNK_BYTES)
    writer.put(large)
    writer.put(b"later")
    raw = b"".join(writer.next())
    assert len(raw) == HEAD_BYTES + CHUNK_BYTES
    writer.put(b"heartbeat", urgent=True)
    assert feed(reader, raw) == []
    raw = b"".join(writer.next())
    assert len(raw) == HEAD_BYTES + 9 + HEAD_BYTES + CHUNK_BYTES
    assert feed(reader, raw) == [b"heartbeat"]
    assert feed(reader, drain(writer)) == [large, b"later"]


def test_small_frames_are_sent_together() -> None:
    writer = FrameWriter()
    for number in range(100):
        writer.put(b"%d" % number)
    pieces = writer.next()
    assert feed(FrameReader(100), b"".join(pieces)) == [b"%d" % number for number in range(100)]
    assert not writer.next()


def test_a_large_frame_is_received_into_its_own_memory() -> None:
    reader = FrameReader(MAX_BYTES)
    content = random.Random(1).randbytes(CHUNK_BYTES)
    assert feed(reader, head(CHUNK_BYTES, CHUNK_BYTES) + content[:100]) == []
    rest = reader.targets[0]
    assert len(rest) == CHUNK_BYTES - 100
    rest[:] = content[100:]
    (frame,) = list(reader.add(len(rest)))
    assert frame == content
    assert frame.obj is rest.obj


def test_the_limit_may_be_raised_between_frames() -> None:
    reader = FrameReader(100)
    assert feed(reader, head(100, 100) + bytes(100) + head(5, 5)[:7]) == [bytes(100)]
    reader.allow(MAX_BYTES)
    assert feed(reader, head(5, 5)[7:] + b"hello") == [b"hello"]
    large = bytes(SMALL_BYTES + 1)
    assert feed(reader, head(len(large), len(large)) + large) == [large]


@pytest.mark.parametrize(
    "raw",
    [
        head(5, 5, b"HTTP"),
        head(101, 101),
        head(1 << 31, 1 << 63),
        head(5, 6),
        head(7, 6),
    ],
)
def test_bytes_that_are_not_frames_are_refused_before_anything_is_allocated(raw: bytes) -> None:
    with pytest.raises(FrameError):
        feed(FrameReader(100), raw)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (head(0, MAX_BYTES), b""),
        (head(5, MAX_BYTES) + b"12345", head(5, MAX_BYTES - 1)),
        (head(5, MAX_BYTES) + b"12345", head(MAX_BYTES - 4, MAX_BYTES)),
    ],
)
def test_chunks_that_do_not_belong_together_are_refused(first: bytes, second: bytes) -> None:
    with pytest.raises(FrameError):
        feed(FrameReader(MAX_BYTES), first + second)


def test_frames_before_an_error_count() -> None:
    reader = FrameReader(100)
    raw = head(2, 2) + b"ok" + head(101, 101)
    reader.targets[0][: len(raw)] = raw
    frames = reader.add(len(raw))
    assert next(frames) == b"ok"
    with pytest.raises(FrameError):
        next(frames)


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes_are_frames_or_refused(raw: bytes) -> None:
    reader = FrameReader(1000)
    try:
        frames = feed(reader, b"DMWS" + raw)
    except FrameError:
        return
    assert sum(map(len, frames)) <= len(raw)


def test_what_was_not_sent_can_be_dropped() -> None:
    writer = FrameWriter()
    writer.put(bytes(3 * CHUNK_BYTES))
    writer.put(b"more", urgent=True)
    writer.next()
    assert writer.unsent_bytes > 2 * CHUNK_BYTES
    writer.clear()
    assert writer.next() == [] and writer.unsent_bytes == 0
