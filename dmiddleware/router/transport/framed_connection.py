"""One connection that carries frames in both directions, over any stream of bytes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final, NamedTuple, TypeAlias

from dmiddleware.errors import FrameError, RouterError
from dmiddleware.router.transport.stream import Stream
from dmiddleware.router.wire.byte_pieces import WireBytes
from dmiddleware.router.wire.stream_frames import CHUNK_BYTES, FrameReader, FrameWriter

__all__ = ["Callbacks", "FramedConnection"]

OnFrame: TypeAlias = Callable[[memoryview], None]
"""Takes a frame, on the transport's thread; its memory is writable and not used again."""

OnEnd: TypeAlias = Callable[[RouterError], None]
"""Called once, after all frames, with the reason why the connection has ended."""

OnRoom: TypeAlias = Callable[[], None]
"""Called on the transport's thread when there is room again for frames that can wait."""


class Callbacks(NamedTuple):
    """The callbacks of a connection.

    Attributes:
        on_frame: takes the frames; it must return soon, and if it raises, the connection ends.
        on_end: notified when the connection has ended, also by :meth:`FramedConnection.close`.
        on_room: notified when there is room again.
    """

    on_frame: OnFrame
    on_end: OnEnd
    on_room: OnRoom = lambda: None


_ROOM_BYTES: Final = 2 * CHUNK_BYTES
"""Up to this many bytes of frames wait to be sent, if their order may still change."""


class FramedConnection:
    """Frames over a stream; both sides send alike.

    Frames are added in order by ``put``, under a lock of the caller's, and sent by :meth:`flush`,
    without it.

    Args:
        stream: the stream, which this object owns from now on.
        max_frame_bytes: a longer frame ends the connection without being received.

    Attributes:
        put: adds a frame, see :meth:`FrameWriter.put`.
        n_received: how many bytes have arrived.
        n_sent: how many times the system has accepted bytes after it was full.
    """

    def __init__(self, stream: Stream, *, max_frame_bytes: int) -> None:
        self.n_received = 0
        self.n_sent = 0
        self._stream = stream
        self._callbacks: Callbacks | None = None
        self._reader = FrameReader(max_frame_bytes)
        self._lock = threading.Lock()
        self._writer = FrameWriter()
        self.put = self._writer.put
        self._is_sending = False
        self._may_send = True
        self._is_closed = False
        self._error: RouterError | None = None

    def start(self, callbacks: Callbacks) -> None:
        """Start to receive; call this once, also if the connection was closed before."""
        self._callbacks = callbacks
        self._stream.receive(self._reader.targets, self._on_bytes)

    def allow(self, max_frame_bytes: int) -> None:
        """Accept longer frames from now on; called by ``on_frame``, or before :meth:`start`."""
        self._reader.allow(max_frame_bytes)

    @property
    def unsent_bytes(self) -> int:
        """How much memory the frames take that wait to be sent."""
        return self._writer.unsent_bytes

    @property
    def has_room(self) -> bool:
        """Whether frames should be added that can wait elsewhere."""
        return self._writer.unsent_bytes < _ROOM_BYTES

    @property
    def n_moved(self) -> int:
        """A number that grows while bytes move, which is a sign that the peer is alive."""
        return self.n_received + self.n_sent

    def replace(self, function: Callable[[WireBytes], WireBytes]) -> None:
        """Send what a function returns for each large frame: the frame, or a small one instead.

        The function is called by the thread that sends, in the frames' order.
        """
        self._writer.replace = function

    def flush(self) -> bool:
        """Send what the system accepts, without waiting; any thread may do so.

        Returns:
            Whether nothing waits any more. Otherwise ``on_room`` is called later.
        """
        # A thread that finds another one here leaves its frames to it.
        while self._writer.unsent_bytes and (not self._is_sending or not self._may_send):
            if not self._lock.acquire(blocking=False):
                return False
            try:
                if not self._may_send:
                    self._writer.clear()
                elif not self._is_sending:
                    pieces = self._writer.next()
                    self._is_sending = not self._stream.send(pieces, self._on_sent)
            finally:
                self._lock.release()
        return not self._writer.unsent_bytes

    def close(self, error: RouterError | None = None) -> None:
        """End the connection, without waiting; frames that wait are dropped.

        Args:
            error: the reason, which ``on_end`` gets; None: that it was closed.
        """
        with self._lock:
            self._error = self._error or error
            self._is_closed, self._may_send = True, False
            self._writer.clear()
        self._stream.close()

    def _on_sent(self, error: RouterError | None) -> None:
        with self._lock:
            if error is not None:
                # Bytes that arrived before the end are still received.
                self._may_send = False
                self._writer.clear()
                return
            self.n_sent += 1
            self._is_sending = False
        self.flush()
        if self.has_room and self._may_send and self._callbacks is not None:
            self._callbacks.on_room()

    def _on_bytes(self, outcome: int | RouterError) -> None:
        callbacks = self._callbacks
        assert callbacks is not None
        if not isinstance(outcome, int):
            self.close()
            callbacks.on_end(self._error or outcome)
            return
        self.n_received += outcome
        try:
            for frame in self._reader.add(outcome):
                if self._is_closed:
                    break
                callbacks.on_frame(frame)
        except (FrameError, MemoryError) as error:
            self.close(error if isinstance(error, RouterError) else FrameError("out of memory"))
        except BaseException as error:
            self.close(FrameError(f"processing a frame failed: {error!r}"))
            self._stream.receive(self._reader.targets, self._on_bytes)
            raise
        # After the end, this reports it.
        self._stream.receive(self._reader.targets, self._on_bytes)
