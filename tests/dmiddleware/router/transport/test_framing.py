"""Frames in a stream of bytes, without sockets."""

from __future__ import annotations

import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dmiddleware.router.transport.framing import (
    FRAGMENT_BYTES,
    HEAD_BYTES,
    REPLY,
    REQUEST,
    SMALL_BYTES,
    FrameReader,
    FrameWriter,
    NotAFrame,
)
from dmiddleware.router.wire.byte_pieces import BytePieces
from tests.dmiddleware.router.unix_sockets import HEAD, framed

MAX_BYTES = 4 << 20
BUFFER_BYTES = 1 << 16

sizes = st.sampled_from(
    [
        0,
        1,
        1000,
        SMALL_BYTES,
        SMALL_BYTES + 1,
        FRAGMENT_BYTES,
        FRAGMENT_BYTES + 1,
        3 * FRAGMENT_BYTES,
    ]
)


def read(stream: bytes, chunk: int, max_bytes: int = MAX_BYTES) -> list[tuple[int, bytes]]:
    """Return the frames in a stream of which at most ``chunk`` bytes arrive at a time."""
    reader, buffer, got, start = (
        FrameReader(REQUEST, max_bytes),
        memoryview(bytearray(1 << 16)),
        [],
        0,
    )
    while start < len(stream):
        n_bytes = 0
        for target in reader.targets(buffer):
            part = stream[start : start + min(len(target), chunk - n_bytes)]
            target[: len(part)] = part
            start += len(part)
            n_bytes += len(part)
        reader.add(n_bytes, buffer)
        while (item := reader.next()) is not None:
            got.append((item[0], bytes(item[1])))
        reader.keep()
        buffer[:] = bytes(len(buffer))
    return got


def drained(writer: FrameWriter, chunk: int) -> bytes:
    stream = bytearray()
    while pieces := writer.pieces():
        part = b"".join(pieces)[:chunk]
        stream += part
        writer.sent(len(part))
    return bytes(stream)


@settings(deadline=None, max_examples=30)
@given(
    frames=st.lists(st.tuples(sizes, st.booleans()), max_size=6),
    sends=st.sampled_from([1000, 40_000, 1 << 20]),
    receives=st.sampled_from([1000, 50_001, 1 << 20]),
)
def test_frames_arrive_whole_however_they_are_sent_and_received(
    frames: list[tuple[int, bool]], sends: int, receives: int
) -> None:
    writer = FrameWriter(REQUEST)
    contents = {number: bytes([number + 1]) * size for number, (size, _) in enumerate(frames)}
    for number, (_, urgent) in enumerate(frames):
        half = len(contents[number]) // 2
        pieces = BytePieces([contents[number][:half], contents[number][half:]])
        writer.put(number, pieces, urgent=urgent)
    got = read(drained(writer, sends), receives)
    assert dict(got) == contents
    assert len(got) == len(contents)
    assert writer.unsent_bytes == 0


def test_bytes_may_arrive_one_at_a_time() -> None:
    stream = framed(REQUEST, 1, b"hello") + framed(REQUEST, 2, b"") + framed(REQUEST, 3, b"again")
    assert read(stream, 1) == [(1, b"hello"), (2, b""), (3, b"again")]


def test_an_urgent_frame_overtakes_a_large_one_between_two_fragments() -> None:
    writer = FrameWriter(REQUEST)
    writer.put(1, bytes(10 * FRAGMENT_BYTES), urgent=False)
    writer.put(2, b"next", urgent=False)
    first = b"".join(writer.pieces())
    writer.sent(len(first))
    writer.put(3, b"urgent", urgent=True)
    rest = drained(writer, 1 << 20)
    assert rest.startswith(framed(REQUEST, 3, b"urgent"))
    got = read(first + rest, 1 << 20)
    assert [number for number, _ in got] == [3, 1, 2]


def test_a_fragment_that_is_partly_sent_is_sent_to_its_end() -> None:
    writer = FrameWriter(REQUEST)
    for number in (1, 2, 3):
        writer.put(number, bytes([number]) * 3 * FRAGMENT_BYTES, urgent=False)
    assert writer.pieces()
    writer.sent(1000)
    writer.put(4, b"urgent", urgent=True)
    writer.forget(1)
    writer.forget(2)
    begun = framed(REQUEST, 1, bytes([1]) * 3 * FRAGMENT_BYTES)[:1000]
    got = read(begun + drained(writer, 1 << 20), 1 << 20)
    assert [number for number, _ in got] == [4, 1, 3]
    assert writer.unsent_bytes == 0


def fragment(size: int, number: int, total: int, kind: int = REQUEST) -> bytes:
    return HEAD.pack(b"DMWU", kind, size, number, total) + bytes(size)


@pytest.mark.parametrize(
    "stream",
    [
        b"GET / HTTP/1.1\r\nHost: nowhere\r\n\r\n",
        HEAD.pack(b"DMWX", REQUEST, 5, 1, 5) + b"magic",
        fragment(4, 1, 4, kind=REPLY),
        fragment(0, 1, MAX_BYTES + 1),
        fragment(0, 1, 2**63),
        fragment(0, 1, 2**64 - 1),
        fragment(4, 1, 5),
        fragment(0, 1, 100_000),
        fragment(100_001, 1, 100_000),
        fragment(100, 1, 100_000) + fragment(100, 2, 100_000),
        fragment(100, 1, 100_000) + fragment(100, 1, 100_001),
        fragment(60_000, 1, 100_000) + fragment(60_000, 1, 100_000),
    ],
)
def test_whatever_is_not_a_frame_is_an_error(stream: bytes) -> None:
    with pytest.raises(NotAFrame):
        read(stream, 1 << 20)


def test_nothing_is_allocated_for_a_claimed_length() -> None:
    reader, buffer = FrameReader(REQUEST, 4096), memoryview(bytearray(BUFFER_BYTES))
    head = framed(REQUEST, 1, bytes(4096))[:HEAD_BYTES]
    tracemalloc.start()
    try:
        buffer[: len(head)] = head
        reader.add(len(head), buffer)
        assert reader.next() is None
        reader.keep()
        assert tracemalloc.get_traced_memory()[1] < 2000
    finally:
        tracemalloc.stop()


def test_frames_that_were_received_together_are_returned_one_by_one() -> None:
    reader, buffer = FrameReader(REQUEST, 4096), memoryview(bytearray(BUFFER_BYTES))
    stream = framed(REQUEST, 1, b"one") + framed(REQUEST, 2, b"other")
    buffer[: len(stream)] = stream
    reader.add(len(stream), buffer)
    assert reader.next() is not None
    reader.keep()
    buffer[:] = bytes(len(buffer))
    item = reader.next()
    assert item is not None
    assert (item[0], bytes(item[1])) == (2, b"other")
