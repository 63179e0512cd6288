"""Large frames with events, which travel in fragments into memory that the receiver has granted.

Fragments have their own small conversation in the middle of a stream. The sender asks, the receiver
answers with the offset from which it wants bytes, and each fragment is answered with the next
offset. There is one fragment on its way at a time, so a connection never carries more than that
ahead of other events. After a lost answer or a new connection the sender asks again, and continues
where the receiver is.

:class:`Transfer` is the sender's side and :class:`Assembly` the receiver's. A frame that has
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
        length: how many bytes there are; 0: the sender asks which it may send.
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
    """The sender's side of one large frame.

    Args:
        event: the frame's only event.
        fragment_bytes: the longest fragment.
        retry_s: seconds after which a fragment without an answer is asked for again.

    Attributes:
        total: the frame's length.
        due_at: when :meth:`next_fragment` returns a question without further input.
    """

    def __init__(self, event: EncodedEvent, *, fragment_bytes: int, retry_s: float) -> None:
        self.total = image_of(event).total
        self.due_at = 0.0
        self._fragment_bytes = fragment_bytes
        self._retry_s = retry_s
        self._offset = 0
        # Whether the receiver has said where to continue, and no fragment is on its way.
        self._may_send = False
        self._asks = True

    def next_fragment(self, now: float) -> Fragment | None:
        """Return what to send now, or None while an answer is awaited."""
        if self._may_send and self._offset < self.total:
            length = min(self._fragment_bytes, self.total - self._offset)
        elif now >= self.due_at:
            self._asks, length = True, 0
        else:
            return None
        self._may_send = False
        self.due_at = now + self._retry_s
        return Fragment(self.total, self._offset, length)

    def on_progress(self, offset: int) -> None:
        """Process the receiver's answer: it has everything before ``offset``.

        Raises:
            FrameError: if the offset lies outside the frame.
        """
        if offset > self.total:
            raise FrameError(
                f"the peer wants byte {offset} of a frame of {self.total} bytes; install the same "
                "version of dmiddleware on all hosts"
            )
        # Without a question, only the answer to the newest fragment has a larger offset.
        if self._asks or offset > self._offset:
            self._offset, self._asks, self._may_send = offset, False, True

    def ask_at(self, time: float) -> None:
        """Ask the receiver again at a time, for example because it was full or is back."""
        self._may_send, self._asks, self.due_at = False, True, time


def fragment_contents(event: EncodedEvent, fragment: Fragment) -> FrameContents:
    """Return the contents of a fragment's frame; large arrays are not copied."""
    image = image_of(event)
    metadata = _encode(fragment)
    if not fragment.length:
        return FrameContents(metadata)
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
    return FrameContents(metadata, (parts[0] if len(parts) == 1 else b"".join(parts),))


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
        self._event: EncodedEvent | None = None

    @property
    def complete(self) -> bool:
        """Whether all bytes have arrived."""
        return self.offset == self.total

    def add(self, fragment: Fragment, frame: Frame) -> None:
        """Add the bytes of a fragment, unless they are others than the next ones.

        Raises:
            FrameError: if the fragment belongs to a frame of another length.
        """
        if fragment.total != self.total:
            raise FrameError(
                f"got a fragment of a frame of {fragment.total} bytes, but the frame has "
                f"{self.total} bytes"
            )
        if fragment.length and fragment.offset == self.offset:
            write_into(self._memory[self.offset :], frame.buffers[0])
            self.offset += fragment.length

    def event(self) -> EncodedEvent:
        """Return the event of the complete frame, as views of its memory.

        Raises:
            FrameError: if the bytes are not a frame with one event.
        """
        if self._event is None:
            self._event = event_of_image(self._memory)
        return self._event
