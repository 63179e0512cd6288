"""The contents of frames: encoded events, several to a frame, and acknowledgments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any, Final, TypeAlias

import msgspec
from msgspec import Meta

from dmiddleware.errors import EncodeError, FrameError
from dmiddleware.router.wire.byte_pieces import copy_bytes
from dmiddleware.router.wire.codec import Codec
from dmiddleware.router.wire.frame import (
    ALIGNMENT,
    MAX_BUFFERS,
    Frame,
    FrameContents,
    FrameFlag,
    FrameType,
    OutgoingFrame,
    decode_frame,
    read_metadata,
)

__all__ = [
    "EncodedEvent",
    "EventImage",
    "encode_event",
    "event_of",
    "event_of_image",
    "frame_contents",
    "image_of",
    "unpack_events",
    "FRAME_OVERHEAD",
    "MAX_BATCH_BYTES",
    "SUBSCRIPTIONS_EVENT",
]

StageArrays: TypeAlias = Callable[[Sequence[memoryview]], list[memoryview] | None]

_SPILL_BYTES: Final = 32 * 1024
"""A larger envelope is sent as a buffer, so that the metadata stays within its limit."""

_EVENT_OVERHEAD: Final = 64
_BUFFER_OVERHEAD: Final = ALIGNMENT + 8
"""The most bytes that an array adds to a frame: its alignment, and a row of the table."""

SUBSCRIPTIONS_EVENT: Final = "$wants"
"""The event that announces a node's subscriptions, in order with its other events."""

MAX_EVENT_NAME: Final = 256
"""The most characters in the name of an event."""

_Count: TypeAlias = Annotated[int, Meta(ge=0)]

FRAME_OVERHEAD: Final = 256
"""The most bytes that a frame has in addition to the sizes of its events."""


class EventImage(msgspec.Struct, eq=False):
    """The bytes of a frame with one event, of which fragments are sent.

    Attributes:
        pieces: the bytes, in order.
        total: how many there are.
        starts: where each piece starts, once that was computed.
        parts: the contents of the frames with its fragments, by their places, once they were made:
            they are the same for all peers, and so is the digest that signs them.
    """

    pieces: Sequence[bytes | memoryview]
    total: int
    starts: list[int] = []
    parts: dict[tuple[int, int], FrameContents] = {}


class EncodedEvent(msgspec.Struct, eq=False):
    """An event, encoded once for all its subscribers.

    Attributes:
        event: the event's name.
        skeleton: its arguments without their arrays.
        buffers: the arrays' bytes, owned by the event.
        size: number of bytes that count against bounds.
        contents: of a frame with this event only, once one was made.
        image: what :func:`image_of` has returned for it.
    """

    event: str
    skeleton: bytes | memoryview
    buffers: tuple[bytes | memoryview, ...]
    size: int
    contents: FrameContents | None = None
    image: EventImage | None = None


class _Envelope(msgspec.Struct, array_like=True, frozen=True):
    event: Annotated[str, Meta(max_length=MAX_EVENT_NAME)]
    skeleton: bytes
    n_buffers: _Count


MAX_BATCH_BYTES: Final = (MAX_BUFFERS - 1) * _BUFFER_OVERHEAD
"""Events of up to this total size never have more arrays than fit into one frame."""

MAX_EVENTS: Final = MAX_BATCH_BYTES // _EVENT_OVERHEAD
"""The most events in one frame; no peer joins more."""

_encode = msgspec.msgpack.Encoder().encode
_envelopes = msgspec.msgpack.Decoder(Annotated[list[_Envelope], Meta(max_length=MAX_EVENTS)])


def encode_event(
    event: str, value: Any, codec: Codec, stage_arrays: StageArrays | None = None
) -> EncodedEvent:
    """Encode an event; its arrays are copied, so the caller may change them at once.

    Args:
        event: the event's name.
        value: its arguments.
        codec: encodes them.
        stage_arrays: copies arrays to memory that they are sent from; may return None.

    Raises:
        EncodeError: if the value cannot be encoded, or the name is too long.
    """
    if len(event) > MAX_EVENT_NAME:
        raise EncodeError(
            f"the event {event[:40]!r}… has a name of {len(event)} characters, but at most "
            f"{MAX_EVENT_NAME} can be sent; use a shorter name"
        )
    skeleton, views = codec.encode(value)
    buffers: tuple[bytes | memoryview, ...] = ()
    if views:
        staged = None if stage_arrays is None else stage_arrays(views)
        buffers = tuple([copy_bytes(view) for view in views] if staged is None else staged)
    encoded = event_of(event, skeleton, buffers)
    if encoded.size > _SPILL_BYTES:
        # It may take long, and this is the last chance without the router's lock.
        frame_contents((encoded,))
    return encoded


def frame_contents(events: Sequence[EncodedEvent]) -> FrameContents:
    """Return the contents of a frame with these events; those of one event are made only once."""
    single = events[0] if len(events) == 1 else None
    if single is not None and single.contents is not None:
        return single.contents
    envelope = _encode([(e.event, e.skeleton, len(e.buffers)) for e in events])
    buffers = [buffer for event in events for buffer in event.buffers]
    if len(envelope) <= _SPILL_BYTES:
        contents = FrameContents(envelope, buffers)
    else:
        contents = FrameContents(b"", [envelope, *buffers], FrameFlag.SPILLED)
    if single is not None:
        single.contents = contents
    return contents


def unpack_events(frame: Frame) -> list[EncodedEvent]:
    """Return the events of a frame; they are views of its memory.

    Raises:
        FrameError: if the frame has no valid events.
    """
    spilled = frame.flags is not FrameFlag.NONE and bool(frame.flags & FrameFlag.SPILLED)
    if spilled and not frame.buffers:
        raise FrameError("the frame has no envelope; it was ignored")
    raw = frame.buffers[0] if spilled else frame.metadata
    envelopes = read_metadata(_envelopes, raw, "list of events")
    events = []
    offset = int(spilled)
    for envelope in envelopes:
        event, skeleton, n_buffers = envelope.event, envelope.skeleton, envelope.n_buffers
        if not n_buffers:
            events.append(event_of(event, skeleton))
            continue
        end = offset + n_buffers
        if not offset <= end <= len(frame.buffers):
            raise FrameError(
                f"event {event!r} has {n_buffers} arrays, but only {len(frame.buffers) - offset} "
                "arrived"
            )
        events.append(event_of(event, skeleton, tuple(frame.buffers[offset:end])))
        offset = end
    if offset != len(frame.buffers):
        raise FrameError(
            f"the frame has {len(frame.buffers) - offset} arrays that belong to no event"
        )
    return events


def image_of(event: EncodedEvent) -> EventImage:
    """Return the bytes of an unsigned frame with this event; its fragments are signed instead."""
    if event.image is None:
        contents = frame_contents((event,))
        frame = OutgoingFrame(
            FrameType.DATA, contents, None, max_size=contents.size, max_buffers=contents.n_buffers
        )
        event.image = EventImage(frame.pieces, len(frame))
    return event.image


def event_of_image(raw: memoryview) -> EncodedEvent:
    """Return the event whose :func:`image_of` was received; it is a view of these bytes.

    Raises:
        FrameError: if the bytes are not a frame with one event.
    """
    # The length of the frame bounds its table.
    events = unpack_events(decode_frame(raw, max_buffers=len(raw)))
    if len(events) != 1:
        raise FrameError(f"a frame in fragments has {len(events)} events instead of one")
    events[0].image = EventImage((raw,), len(raw))
    return events[0]


def event_of(
    event: str, skeleton: bytes | memoryview, buffers: tuple[bytes | memoryview, ...] = ()
) -> EncodedEvent:
    """Return an event with the size that both sides count."""
    size = _EVENT_OVERHEAD + len(event) + len(skeleton)
    if buffers:
        size += _BUFFER_OVERHEAD * len(buffers) + sum(map(len, buffers))
    return EncodedEvent(event, skeleton, buffers, size)
