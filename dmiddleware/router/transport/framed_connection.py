"""One connection that carries frames in both directions, over any stream of bytes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeAlias

from dmiddleware.errors import FrameError, RouterError
from dmiddleware.router.transport.stream import Stream
from dmiddleware.router.wire.byte_pieces import WireBytes
from dmiddleware.router.wire.stream_frames import FrameReader, FrameWriter

__all__ = ["FramedConnection", "OnEnd", "OnFrame"]

OnFrame: TypeAlias = Callable[[memoryview], None]
"""Takes a frame, on the transport's thread; its memory is writable and not used again."""

OnEnd: TypeAlias = Callable[[RouterError], None]
"""Called once, after all frames, with the reason why the connection has ended."""


class FramedConnection:
    """Frames over a stream; both sides send alike.

    Args:
        stream: the stream, which this object owns from now on.
        on_frame: takes the frames; it must return soon, and if it raises, the connection ends.
        on_end: notified when the connection has ended, also by :meth:`close`.
        max_frame_bytes: a longer frame ends the connection without being received.

    Attributes:
        n_received: how many bytes have arrived; signs that the peer is alive.
        n_sent: how many times the system has accepted bytes after it was full; such signs too.
    """

    def __init__(
        self, stream: Stream, *, on_frame: OnFrame, on_end: OnEnd, max_frame_bytes: int
    ) -> None:
        self.n_received = 0
        self.n_sent = 0
        self._stream = stream
        self._on_frame = on_frame
        self._on_end = on_end
        self._reader = FrameReader(max_frame_bytes)
        self._lock = threading.Lock()
        self._writer = FrameWriter()
        self._is_sending = False
        self._is_closed = False
        self._error: RouterError | None = None

    def start(self) -> None:
        """Start to receive; call this once."""
        self._stream.receive(self._reader.targets, self._on_bytes)

    def allow(self, max_frame_bytes: int) -> None:
        """Accept longer frames from now on; called by ``on_frame``, or before :meth:`start`."""
        self._reader.allow(max_frame_bytes)

    @property
    def unsent_bytes(self) -> int:
        """How much memory the frames take that wait to be sent."""
        return self._writer.unsent_bytes

    def send(self, frame: WireBytes, *, urgent: bool = False) -> None:
        """Send a frame without waiting; any thread may do so.

        If the connection has ended, nothing happens.

        Args:
            frame: the frame; its bytes must not change until they have been sent.
            urgent: whether it overtakes the frames that wait, if it is small.
        """
        with self._lock:
            if not self._is_closed:
                self._writer.put(frame, urgent=urgent)
                self._send()

    def close(self, error: RouterError | None = None) -> None:
        """End the connection, without waiting; frames that wait are dropped.

        Args:
            error: the reason, which ``on_end`` gets; None: that it was closed.
        """
        with self._lock:
            self._error = self._error or error
            self._is_closed = True
            self._writer.clear()
        self._stream.close()

    def _send(self) -> None:
        while not self._is_sending and (pieces := self._writer.next()):
            self._is_sending = not self._stream.send(pieces, self._on_sent)

    def _on_sent(self, error: RouterError | None) -> None:
        if error is not None:
            # What has arrived before the end is still received.
            with self._lock:
                self._writer.clear()
            return
        with self._lock:
            self.n_sent += 1
            self._is_sending = False
            if not self._is_closed:
                self._send()

    def _on_bytes(self, outcome: int | RouterError) -> None:
        if not isinstance(outcome, int):
            self.close()
            self._on_end(self._error or outcome)
            return
        self.n_received += outcome
        try:
            for frame in self._reader.add(outcome):
                if self._is_closed:
                    break
                self._on_frame(frame)
        except (FrameError, MemoryError) as error:
            self.close(error if isinstance(error, RouterError) else FrameError("out of memory"))
        except BaseException as error:
            self.close(FrameError(f"processing a frame failed: {error!r}"))
            self._stream.receive(self._reader.targets, self._on_bytes)
            raise
        # After the end, this reports it.
        self._stream.receive(self._reader.targets, self._on_bytes)
