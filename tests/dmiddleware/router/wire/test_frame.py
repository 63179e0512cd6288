"""Frames: complete, checked and authentic, or refused."""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dmiddleware.errors import AuthError, FrameError, FrameTooLarge
from dmiddleware.router.wire.frame import (
    ALIGNMENT,
    HEADER_SIZE,
    MAX_METADATA,
    Frame,
    FrameContents,
    FrameMac,
    FrameType,
    OutgoingFrame,
    decode_frame,
    digest_if_large,
    encode_frame,
)

KEY = bytes(range(32))
MAX_SIZE = 1 << 24
u64 = st.integers(0, 2**64 - 1)
frames = st.builds(
    Frame,
    type=st.sampled_from(FrameType),
    session=u64,
    incarnation=u64,
    stream=st.integers(0, 2**32 - 1),
    sequence=u64,
    data_sequence=u64,
    metadata=st.binary(max_size=300),
    buffers=st.lists(st.binary(max_size=300), max_size=4).map(tuple),
)
macs = st.sampled_from([None, FrameMac(KEY, cover_body=True), FrameMac(KEY, cover_body=False)])


def plain(frame: Frame) -> tuple[object, ...]:
    return (
        frame.type,
        frame.session,
        frame.incarnation,
        frame.stream,
        frame.sequence,
        frame.data_sequence,
        bytes(frame.metadata),
        [bytes(buffer) for buffer in frame.buffers],
    )


@settings(deadline=None)
@given(frames, macs)
def test_a_frame_round_trips(frame: Frame, mac: FrameMac | None) -> None:
    raw = bytearray(encode_frame(frame, mac, max_size=MAX_SIZE))
    assert plain(decode_frame(raw, mac)) == plain(frame)


@settings(deadline=None)
@given(frames)
def test_buffers_begin_at_aligned_offsets(frame: Frame) -> None:
    raw = bytearray(encode_frame(frame, max_size=MAX_SIZE))
    start = np.frombuffer(raw, np.uint8).__array_interface__["data"][0]
    for buffer in decode_frame(raw).buffers:
        if len(buffer):
            place = np.frombuffer(buffer, np.uint8).__array_interface__["data"][0]
            assert (place - start) % ALIGNMENT == 0


@settings(deadline=None)
@given(frames, st.data())
def test_any_flipped_bit_is_refused_if_the_body_is_signed(
    frame: Frame, data: st.DataObject
) -> None:
    mac = FrameMac(KEY, cover_body=True)
    raw = bytearray(encode_frame(frame, mac, max_size=MAX_SIZE))
    bit = data.draw(st.integers(0, 8 * len(raw) - 1))
    raw[bit // 8] ^= 1 << bit % 8
    with pytest.raises((AuthError, FrameError)):
        decode_frame(raw, mac)


@settings(deadline=None)
@given(frames, st.data())
def test_a_flipped_bit_in_the_head_is_refused_if_only_the_head_is_signed(
    frame: Frame, data: st.DataObject
) -> None:
    mac = FrameMac(KEY, cover_body=False)
    raw = bytearray(encode_frame(frame, mac, max_size=MAX_SIZE))
    head = HEADER_SIZE + len(frame.metadata) + 8 * len(frame.buffers)
    bit = data.draw(st.integers(0, 8 * head - 1))
    raw[bit // 8] ^= 1 << bit % 8
    with pytest.raises((AuthError, FrameError)):
        decode_frame(raw, mac)


@settings(deadline=None)
@given(st.binary(max_size=400))
def test_random_bytes_are_refused(raw: bytes) -> None:
    with pytest.raises(FrameError):
        decode_frame(raw)


@settings(deadline=None)
@given(frames, st.data())
def test_a_damaged_unsigned_frame_is_read_or_refused_and_never_crashes(
    frame: Frame, data: st.DataObject
) -> None:
    raw = bytearray(encode_frame(frame, max_size=MAX_SIZE))
    for _ in range(3):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(AuthError, FrameError):
        decode_frame(raw)


@settings(deadline=None)
@given(frames, st.data())
def test_a_frame_cut_short_or_made_longer_is_refused(frame: Frame, data: st.DataObject) -> None:
    raw = bytearray(encode_frame(frame, max_size=MAX_SIZE))
    with pytest.raises(FrameError):
        decode_frame(raw[: data.draw(st.integers(0, len(raw) - 1))])
    with pytest.raises(FrameError):
        decode_frame(raw + b"x")


@pytest.mark.parametrize("claimed", [2**33, 2**63, 2**64 - 1])
@pytest.mark.parametrize("offset", [HEADER_SIZE, 40])
def test_a_frame_with_a_false_length_is_refused(offset: int, claimed: int) -> None:
    raw = bytearray(encode_frame(Frame(FrameType.DATA, buffers=(b"abc",)), max_size=MAX_SIZE))
    struct.pack_into("<Q", raw, offset, claimed)
    with pytest.raises(FrameError):
        decode_frame(raw)


def test_a_frame_larger_than_the_receiver_accepts_is_refused_at_the_sender() -> None:
    with pytest.raises(FrameTooLarge, match="the receiver accepts 1000"):
        encode_frame(Frame(FrameType.DATA, buffers=(bytes(1000),)), max_size=1000)


def test_metadata_over_its_limit_is_refused_at_the_sender() -> None:
    with pytest.raises(FrameTooLarge, match="metadata"):
        encode_frame(Frame(FrameType.DATA, metadata=bytes(MAX_METADATA + 1)), max_size=MAX_SIZE)


def test_a_frame_signed_with_another_key_is_refused() -> None:
    raw = bytearray(
        encode_frame(Frame(FrameType.DATA), FrameMac(KEY, cover_body=True), max_size=MAX_SIZE)
    )
    with pytest.raises(AuthError, match="signature is wrong"):
        decode_frame(raw, FrameMac(bytes(32), cover_body=True))


def test_an_unsigned_frame_is_refused_by_a_side_with_a_key() -> None:
    raw = bytearray(encode_frame(Frame(FrameType.DATA), max_size=MAX_SIZE))
    with pytest.raises(AuthError):
        decode_frame(raw, FrameMac(KEY, cover_body=False))


def test_a_signed_frame_is_refused_by_a_side_without_a_key() -> None:
    raw = bytearray(
        encode_frame(Frame(FrameType.DATA), FrameMac(KEY, cover_body=True), max_size=MAX_SIZE)
    )
    with pytest.raises(AuthError, match="has no key"):
        decode_frame(raw)


def test_an_unsigned_body_is_refused_by_a_side_that_requires_one() -> None:
    raw = bytearray(
        encode_frame(Frame(FrameType.DATA), FrameMac(KEY, cover_body=False), max_size=MAX_SIZE)
    )
    with pytest.raises(AuthError, match="arrays are not signed"):
        decode_frame(raw, FrameMac(KEY, cover_body=True))


def test_a_frame_of_another_version_is_refused_with_its_version() -> None:
    raw = bytearray(encode_frame(Frame(FrameType.DATA), max_size=MAX_SIZE))
    struct.pack_into("<H", raw, 4, 7)
    with pytest.raises(FrameError, match="version 7"):
        decode_frame(raw)


def test_a_key_of_the_wrong_length_is_refused() -> None:
    with pytest.raises(ValueError, match="32 bytes"):
        FrameMac(b"short", cover_body=True)


class CountingMac(FrameMac):
    """Records how many bytes each signature covers."""

    def __init__(self, key: bytes = KEY) -> None:
        super().__init__(key, cover_body=True)
        self.covered: list[int] = []

    def digest(self, parts: Sequence[bytes | memoryview]) -> bytes:
        self.covered.append(sum(map(len, parts)))
        return super().digest(parts)


def test_a_frame_is_signed_once_and_only_when_its_bytes_are_used() -> None:
    mac = CountingMac()
    frame = OutgoingFrame(FrameType.DATA, FrameContents(b"abc"), mac, max_size=MAX_SIZE)
    assert len(frame) == HEADER_SIZE + 3 and mac.covered == []
    assert bytes(frame) == bytes(frame) and len(mac.covered) == 1
    assert decode_frame(bytes(frame), mac).metadata == b"abc"


def test_frames_to_several_peers_share_their_buffers_and_the_hash_of_them() -> None:
    array = bytes(1 << 20)
    contents = FrameContents(b"abc", [array])
    macs = [CountingMac(bytes(31) + bytes([number])) for number in range(3)]
    sent = [
        OutgoingFrame(FrameType.DATA, contents, mac, max_size=MAX_SIZE, session=number)
        for number, mac in enumerate(macs)
    ]
    for frame, mac in zip(sent, macs, strict=True):
        assert frame.pieces[-1] is array
        assert max(mac.covered) < 1000, "the megabyte itself is hashed without a session's key"
        decode_frame(bytes(frame), mac)
    with pytest.raises(AuthError):
        decode_frame(bytes(sent[0]), macs[1])
    damaged = bytearray(bytes(sent[0]))
    damaged[-1] ^= 1
    with pytest.raises(AuthError):
        decode_frame(damaged, macs[0])


def test_empty_buffers_that_add_no_byte_are_not_signed() -> None:
    mac = FrameMac(KEY, cover_body=True)
    for n_bytes in range(64):
        frame = Frame(FrameType.DATA, session=7, metadata=bytes(n_bytes), buffers=(b"",))
        decoded = decode_frame(encode_frame(frame, mac, max_size=1 << 20), mac)
        assert [bytes(buffer) for buffer in decoded.buffers] == [b""]


@pytest.mark.parametrize("cover_body", [True, False])
def test_the_digest_of_a_large_body_can_be_computed_before(cover_body: bool) -> None:
    mac = FrameMac(KEY, cover_body=cover_body)
    frame = Frame(FrameType.DATA, session=7, metadata=b"abc", buffers=(bytes(100_000), b"x"))
    raw = bytearray(encode_frame(frame, mac, max_size=1 << 20))
    digest = digest_if_large(raw)
    assert (digest is not None) == cover_body
    assert plain(decode_frame(raw, mac, body_digest=digest)) == plain(decode_frame(raw, mac))
    raw[-1] ^= 1
    if cover_body:
        with pytest.raises(AuthError, match="signature"):
            decode_frame(raw, mac, body_digest=digest_if_large(raw))


def test_frames_that_are_small_or_claim_a_head_that_is_too_long_have_no_digest() -> None:
    mac = FrameMac(KEY, cover_body=True)
    assert digest_if_large(encode_frame(Frame(FrameType.DATA), mac, max_size=1 << 20)) is None
    assert digest_if_large(b"\xff" * 100_000) is None
