"""What frames carry: events joined into one frame, and answers to frames."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias

import msgspec

from dmiddleware.errors import FrameError
from dmiddleware.router.wire.byte_pieces import copy_bytes
from dmiddleware.router.wire.codec import Codec
from dmiddleware.router.wire.frame import ALIGNMENT, MAX_BUFFERS, Frame, FrameFlag, read_metadata

__all__ = [
    "EncodedEvent",
    "Acknowledgements",
    "encode_event",
    "decode_event",
    "pack_events",
    "unpack_events",
    "FRAME_OVERHEAD",
    "MAX_BATCH_BYTES",
    "SUBSCRIPTIONS_EVENT",
]

StageArrays: TypeAlias = Callable[[Sequence[memoryview]], list[memoryview] | None]

_SPILL_BYTES: Final = 32 * 1024
"""Beyond this the envelope travels as a buffer, so that metadata stays within its bound."""

_EVENT_OVERHEAD: Final = 64
_BUFFER_OVERHEAD: Final = ALIGNMENT + 8
"""What an array takes in a frame beside its bytes, at most: its alignment, a row of the table."""

SUBSCRIPTIONS_EVENT: Final = "$wants"
"""The event by which nodes tell each other what they want; it keeps its place among the others."""

FRAME_OVERHEAD: Final = 256
"""A frame is at most so much larger than the sizes of its events together."""


class EncodedEvent(msgspec.Struct, frozen=True):
    """An event, encoded once, however many peers it goes to.

    Attributes:
        event: its name.
        skeleton: its arguments without their arrays.
        buffers: the arrays' bytes; the event owns them.
        size: bytes that count against bounds.
    """

    event: str
    skeleton: bytes | memoryview
    buffers: tuple[bytes | memoryview, ...]
    size: int


class Acknowledgements(msgspec.Struct, array_like=True, frozen=True):
    """What became of frames.

    Attributes:
        acks: ``(stream, sequence, credit in bytes)`` of frames that were accepted.
        busy: ``(stream, sequence, delay in seconds)`` of frames to send again later.
    """

    acks: tuple[tuple[int, int, int], ...] = ()
    busy: tuple[tuple[int, int, float], ...] = ()


class _Envelope(msgspec.Struct, array_like=True, frozen=True):
    event: str
    skeleton: bytes
    n_buffers: int


MAX_BATCH_BYTES: Final = (MAX_BUFFERS - 1) * _BUFFER_OVERHEAD
"""Events of so many bytes together have no more arrays than fit into one frame."""

_encode = msgspec.msgpack.Encoder().encode
_envelopes = msgspec.msgpack.Decoder(list[_Envelope])


def encode_event(
    event: str, value: Any, codec: Codec, stage_arrays: StageArrays | None = None
) -> EncodedEvent:
    """Encode an event; its arrays are copied, so that the caller may change them at once.

    Args:
        event: its name.
        value: its arguments.
        codec: encodes them.
        stage_arrays: copies arrays to where they are sent from; may return None.

    Raises:
        EncodeError: if the value cannot travel.
    """
    skeleton, views = codec.encode(value)
    buffers: tuple[bytes | memoryview, ...] = ()
    if views:
        staged = None if stage_arrays is None else stage_arrays(views)
        buffers = tuple([copy_bytes(view) for view in views] if staged is None else staged)
    return EncodedEvent(event, skeleton, buffers, _size(event, skeleton, buffers))


def decode_event(encoded: EncodedEvent, codec: Codec) -> Any:
    """Return the value that :func:`encode_event` was given.

    Raises:
        DecodeError: if the bytes are no encoded value.
    """
    return codec.decode(encoded.skeleton, encoded.buffers)


def pack_events(
    events: Sequence[EncodedEvent],
) -> tuple[bytes, tuple[bytes | memoryview, ...], FrameFlag]:
    """Join events for one frame.

    Returns:
        The frame's metadata, buffers and flags.
    """
    envelope = _encode([(e.event, e.skeleton, len(e.buffers)) for e in events])
    buffers = tuple(buffer for event in events for buffer in event.buffers)
    if len(envelope) <= _SPILL_BYTES:
        return envelope, buffers, FrameFlag.NONE
    return b"", (envelope, *buffers), FrameFlag.SPILLED


def unpack_events(frame: Frame) -> list[EncodedEvent]:
    """Take the events out of a frame; they are views of its memory.

    Raises:
        FrameError: if the frame carries no events.
    """
    spilled = frame.flags is not FrameFlag.NONE and bool(frame.flags & FrameFlag.SPILLED)
    if spilled and not frame.buffers:
        raise FrameError("the frame's envelope is missing")
    raw = frame.buffers[0] if spilled else frame.metadata
    envelopes = read_metadata(_envelopes, raw, "list of events")
    events = []
    place = int(spilled)
    for envelope in envelopes:
        event, skeleton, n_buffers = envelope.event, envelope.skeleton, envelope.n_buffers
        if not n_buffers:
            events.append(EncodedEvent(event, skeleton, (), _size(event, skeleton, ())))
            continue
        end = place + n_buffers
        if not place <= end <= len(frame.buffers):
            raise FrameError(f"event {event!r} claims {n_buffers} arrays that did not arrive")
        buffers = tuple(frame.buffers[place:end])
        size = _size(event, skeleton, buffers)
        events.append(EncodedEvent(event, skeleton, buffers, size))
        place = end
    if place != len(frame.buffers):
        raise FrameError(f"{len(frame.buffers) - place} arrays arrived that no event claims")
    return events


def _size(event: str, skeleton: bytes, buffers: Sequence[bytes | memoryview]) -> int:
    size = _EVENT_OVERHEAD + len(event) + len(skeleton)
    return size + _BUFFER_OVERHEAD * len(buffers) + sum(map(len, buffers)) if buffers else size
