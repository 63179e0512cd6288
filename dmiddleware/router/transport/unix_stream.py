"""Frames over a connected Unix-domain socket, for either side of :mod:`.unix`.

Whoever has a frame writes it to the socket, and wakes no other thread of its process; what the
socket does not take at once goes out from a writer thread, which is started when it is first
needed. One thread reads.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

import numpy as np

from dmiddleware.router.wire.byte_pieces import Parts, Raw

__all__ = ["ANSWER", "REQUEST", "FrameStream", "NotAFrame"]

REQUEST: Final = 1
ANSWER: Final = 2

_HEAD: Final = struct.Struct("<4sB3xQQ")
"""Magic, kind, length of what follows, number of the request."""

_MAGIC: Final = b"DMWU"

_LOOK_EVERY_S: Final = 0.25

_READ_BYTES: Final = 16 * 1024
"""Shorter frames come several at a time, longer ones straight to where they stay."""

_SOCKET_BYTES: Final = 2 << 20
"""What the system is asked to hold for a slow reader; it may allow less."""

_ENOUGH_BYTES: Final = 16 << 20
_MAX_PIECES: Final = 512
_BEGUN: Final = -1
_NO_SIGNAL: Final = socket.MSG_NOSIGNAL
_AT_ONCE: Final = socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT

_Piece = bytes | bytearray | memoryview


class NotAFrame(Exception):
    """What came is no frame, or one that is too long."""


class FrameStream:
    """A connected socket that frames go out from and come in at.

    Args:
        connected: the socket, which is this object's from here on.
        name: of the writer's thread.
        sends: kind of the frames that go out.
        takes: kind of the frames that come in.
        max_frame_bytes: longer frames are not read.

    Attributes:
        lock: held by who writes.
        closed: whether this side has closed.
    """

    def __init__(
        self,
        connected: socket.socket,
        *,
        name: str,
        sends: int,
        takes: int,
        max_frame_bytes: int,
    ) -> None:
        connected.settimeout(None)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BYTES)
        self.lock = threading.Lock()
        self.closed = False
        self._socket = connected
        self._name = name
        self._sends = sends
        self._takes = takes
        self._max_frame_bytes = max_frame_bytes
        self._look: Callable[[], None] | None = None
        self._look_at = 0.0
        self._shut = False
        self._changed = threading.Condition(self.lock)
        self._writer: threading.Thread | None = None
        self._writing = False
        self._unsent: OrderedDict[int, tuple[list[_Piece], int]] = OrderedDict()
        self._unsent_bytes = 0

    def write(self, number: int, raw: Raw) -> None:
        """Send a frame without waiting; called with the lock held.

        Nothing happens if the connection is broken: the reader finds that out.
        """
        if self._shut:
            return
        size = len(raw)
        pieces: list[_Piece] = [_HEAD.pack(_MAGIC, self._sends, size, number)]
        pieces += raw.pieces if isinstance(raw, Parts) else (raw,)
        size += _HEAD.size
        if not self._writing:
            try:
                size = self._send(pieces, size, _AT_ONCE)
            except OSError:
                self._shut_down()
                return
            if not size:
                return
            number = _BEGUN
        self._leave_to_writer(number, pieces, size)

    def forget(self, number: int) -> None:
        """Do not send a frame, unless it was begun; called with the lock held."""
        _, size = self._unsent.pop(number, ((), 0))
        self._unsent_bytes -= size

    def wait_until_read(self) -> None:
        """Wait as long as the other side leaves too much unread."""
        if self._unsent_bytes > _ENOUGH_BYTES:
            with self._changed:
                self._changed.wait_for(lambda: self._shut or self._unsent_bytes <= _ENOUGH_BYTES)

    def read(
        self, take: Callable[[int, memoryview], None], look: Callable[[], None] | None = None
    ) -> None:
        """Read frames until this side closes.

        Args:
            take: gets the number and the content of each.
            look: called several times a second. None: nothing is.

        Raises:
            OSError: if the connection broke.
            NotAFrame: if something else came.
        """
        if look is not None:
            # Python's own timeout costs a call to the system for each read.
            limit = struct.pack("ll", 0, int(_LOOK_EVERY_S * 1e6))
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
            self._look = look
        buffer = bytearray(_READ_BYTES)
        window = memoryview(buffer)
        kept = 0
        while not self.closed:
            end = kept + self._receive(window[kept:])
            begin = self._take_frames(buffer, window[:end], take)
            kept = end - begin
            window[:kept] = window[begin:end]

    def shut(self) -> None:
        """Close the connection for both sides; what is in the system already still arrives."""
        with self.lock:
            self.closed = True
            self._shut_down()

    def release(self) -> None:
        """End the writer and close the socket; called by the reader, when it reads no more."""
        with self.lock:
            self._shut_down()
        if self._writer is not None:
            self._writer.join()
        with self.lock:
            self._socket.close()

    def _take_frames(
        self, buffer: bytearray, window: memoryview, take: Callable[[int, memoryview], None]
    ) -> int:
        """Take the frames that begin in a window of the buffer; returns where the rest begins."""
        begin, end = 0, len(window)
        while end - begin >= _HEAD.size and not self.closed:
            magic, kind, size, number = _HEAD.unpack_from(buffer, begin)
            if magic != _MAGIC or kind != self._takes or size > self._max_frame_bytes:
                raise NotAFrame
            begin += _HEAD.size
            if size <= end - begin:
                frame = memoryview(buffer[begin : begin + size])
                begin += size
            else:
                frame = self._receive_rest(size, window[begin:])
                begin = end
            take(number, frame)
        return begin

    def _receive_rest(self, size: int, beginning: memoryview) -> memoryview:
        frame = np.empty(size, np.uint8).data
        place = len(beginning)
        frame[:place] = beginning
        while place < size:
            place += self._receive(frame[place:], socket.MSG_WAITALL)
        return frame

    def _receive(self, target: memoryview, flags: int = 0) -> int:
        while True:
            if self._look is not None and time.monotonic() >= self._look_at:
                self._look()
                self._look_at = time.monotonic() + _LOOK_EVERY_S
            try:
                received = self._socket.recv_into(target, 0, flags)
            except BlockingIOError:
                continue
            if not received:
                raise ConnectionResetError("the other side closed the connection")
            return received

    def _send(self, pieces: list[_Piece], size: int, flags: int) -> int:
        """Send pieces of so many bytes in all, and remove them from the list.

        Returns:
            How many bytes the socket did not take, with the flags for not waiting.
        """
        while True:
            try:
                sent = self._socket.sendmsg(pieces[:_MAX_PIECES], (), flags)
            except BlockingIOError:
                return size
            size -= sent
            if not size:
                return 0
            _remove(pieces, sent)

    def _leave_to_writer(self, number: int, pieces: list[_Piece], size: int) -> None:
        self._unsent[number] = pieces, size
        self._unsent_bytes += size
        self._writing = True
        if self._writer is not None:
            self._changed.notify_all()
            return
        writer = threading.Thread(target=self._write_on, name=self._name, daemon=True)
        try:
            writer.start()
        except RuntimeError:
            # The system allows no more threads.
            self._shut_down()
            return
        self._writer = writer

    def _write_on(self) -> None:
        while True:
            with self._changed:
                self._writing = bool(self._unsent)
                self._changed.wait_for(lambda: self._shut or self._unsent)
                if self._shut:
                    return
                _, (pieces, size) = self._unsent.popitem(last=False)
            try:
                self._send(pieces, size, _NO_SIGNAL)
            except OSError:
                with self.lock:
                    self._shut_down()
                return
            with self._changed:
                self._unsent_bytes -= size
                self._changed.notify_all()

    def _shut_down(self) -> None:
        if self._shut:
            return
        self._shut = True
        self._unsent.clear()
        self._changed.notify_all()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)


def _remove(pieces: list[_Piece], sent: int) -> None:
    """Remove so many bytes from the beginning of pieces."""
    for index, piece in enumerate(pieces):
        if sent < len(piece):
            pieces[: index + 1] = [memoryview(piece)[sent:]]
            return
        sent -= len(piece)
