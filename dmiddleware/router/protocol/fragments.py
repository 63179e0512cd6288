"""Large events, which travel in fragments into memory that the receiver has granted.

The sender asks for the memory once. When there is enough, the receiver answers from which byte on
it wants the event, and the fragments follow in order, in turns with other frames. After a new
connection the sender asks again, and continues where the receiver is.

:class:`Transfer` is the sender's side and :class:`Assembly` the receiver's. An event that has
arrived in full is processed like any other frame of its stream, so order, acknowledgment and
back-pressure do not depend on its size.
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from dmiddleware.errors import FrameError
from dmiddleware.router.wire.byte_pieces import new_memory, write_into
from dmiddleware.router.wire.envelope import EncodedEvent, event_of_image, image_of
from dmiddleware.router.wire.frame import Frame, FrameContents, read_metadata

__all__ = ["Assembly", "Fragment", "Transfer", "fragment_contents"]

_Offset = Annotated[int, Meta(ge=0, le=1 << 60)]


class Fragment(msgspec.Struct, array_like=True, frozen=True):
    """What one fragment frame is about; its only buffer has the bytes.

    Attributes:
        total: the length of the whole frame, in bytes.
        offset: where the bytes belong.
        length: how many bytes there are; 0: the sender asks for the memory.
    """

    total: _Offset
    offset: _Offset
    length: _Offset

    @classmethod
    def of(cls, frame: Frame) -> Fragment:
        """Read and check the metadata of a fragment frame.

        Raises:
            FrameError: if the frame is not a valid fragment.
        """
        fragment = read_metadata(_decoder, frame.metadata, "fragment")
        n_bytes = sum(map(len, frame.buffers))
        if len(frame.buffers) > 1 or n_bytes != fragment.length:
            raise FrameError(
                f"a fragment claims {fragment.length} bytes, but {n_bytes} arrived in "
                f"{len(frame.buffers)} arrays"
            )
        if fragment.offset + fragment.length > fragment.total:
            raise FrameError(
                f"a fragment ends at byte {fragment.offset + fragment.length} of a frame of "
                f"{fragment.total} bytes"
            )
        return fragment


_encode: Final = msgspec.msgpack.Encoder().encode
_decoder: Final = msgspec.msgpack.Decoder(Fragment)


class Transfer:
    """The sender's side of one large frame, over one connection.

    Args:
        event: the frame's only event.
        fragment_bytes: the longest fragment.

    Attributes:
        total: the frame's length.
    """

    def __init__(self, event: EncodedEvent, *, fragment_bytes: int) -> None:
        self.total = image_of(event).total
        self._fragment_bytes = fragment_bytes
        self._has_asked = False
        self._offset: int | None = None

    @property
    def is_sent(self) -> bool:
        """Whether all fragments have been sent."""
        return self._offset == self.total

    def next_fragment(self) -> Fragment | None:
        """Return what to send now, or None while the answer is awaited, and at the end."""
        if self._offset is None:
            if self._has_asked:
                return None
            self._has_asked = True
            return Fragment(self.total, 0, 0)
        if self.is_sent:
            return None
        start = self._offset
        self._offset = min(start + self._fragment_bytes, self.total)
        return Fragment(self.total, start, self._offset - start)

    def on_grant(self, offset: int) -> None:
        """Process the receiver's answer: it has the memory, and everything before ``offset``.

        Raises:
            FrameError: if it was not asked, or the offset lies outside the frame.
        """
        if not self._has_asked or self._offset is not None or offset > self.total:
            raise FrameError(
                f"the peer wants byte {offset} of a frame of {self.total} bytes, which was not "
                "offered to it; install the same version of dmiddleware on all hosts"
            )
        self._offset = offset


def fragment_contents(event: EncodedEvent, fragment: Fragment) -> FrameContents:
    """Return the contents of a fragment's frame; large arrays are not copied."""
    image = image_of(event)
    metadata = _encode(fragment)
    if not fragment.length:
        return FrameContents(metadata)
    place = fragment.offset, fragment.length
    if (content := image.parts.get(place)) is not None:
        return content
    if not image.starts:
        image.starts = list(accumulate(map(len, image.pieces[:-1]), initial=0))
    start, end = fragment.offset, fragment.offset + fragment.length
    parts = []
    index = bisect_right(image.starts, start) - 1
    while start < end:
        at, piece = image.starts[index], image.pieces[index]
        parts.append(memoryview(piece)[start - at : end - at])
        start = max(start, at + len(piece))
        index += 1
    joined = parts[0] if len(parts) == 1 else b"".join(parts)
    image.parts[place] = FrameContents(metadata, (joined,))
    return image.parts[place]


class Assembly:
    """The receiver's side of one large frame: memory for it, filled from the start.

    Args:
        stream: the frame's stream.
        sequence: its number in the stream.
        total: its length, which the caller grants.

    Attributes:
        stream: see above, as for the attributes after it.
        offset: how many bytes have arrived.

    Raises:
        MemoryError: if the system refuses the memory.
    """

    def __init__(self, stream: int, sequence: int, total: int) -> None:
        self.stream = stream
        self.sequence = sequence
        self.total = total
        self.offset = 0
        self._memory = new_memory(total)

    @property
    def is_complete(self) -> bool:
        """Whether all bytes have arrived."""
        return self.offset == self.total

    def add(self, fragment: Fragment, frame: Frame) -> None:
        """Add the bytes of a fragment.

        Raises:
            FrameError: if they are not the next ones of this frame.
        """
        if fragment.total != self.total or fragment.offset != self.offset:
            raise FrameError(
                f"got byte {fragment.offset} of a frame of {fragment.total} bytes, but expected "
                f"byte {self.offset} of {self.total}"
            )
        write_into(self._memory[self.offset :], frame.buffers[0])
        self.offset += fragment.length

    def event(self) -> EncodedEvent:
        """Return the event of the complete frame, as views of its memory.

        Raises:
            FrameError: if the bytes are not a frame with one event.
        """
        return event_of_image(self._memory)
