"""One connection that carries frames, for either side of it.

Senders write to the socket themselves. Bytes that it does not accept at once are sent by the
loop's threads, which also read. One thread at a time reads a connection.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Callable
from functools import partial
from typing import Final, Protocol

from dmiddleware.router.transport.framing import FrameReader, FrameWriter, NotAFrame, Piece
from dmiddleware.router.transport.io_loop import BROKEN, BUFFER_BYTES, READ, WRITE, IoLoop
from dmiddleware.router.wire.byte_pieces import WireBytes

__all__ = ["Connection", "ConnectionOwner", "PlainSocket", "Wire", "describe"]

_MAX_PIECES: Final = 512
_AT_ONCE: Final = socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT

_PATIENCE: Final = struct.pack("ll", 0, 20_000)
"""20 ms, as the system's timeval."""

_READS_PER_EVENT: Final = 16
"""How many times a connection is read before others get their turn."""


class Wire(Protocol):
    """A connected socket that never blocks."""

    @property
    def descriptor(self) -> int:
        """Number of the socket's descriptor."""
        ...

    @property
    def is_ready(self) -> bool:
        """Whether frames can be exchanged without a handshake."""
        ...

    @property
    def reports_rest(self) -> bool:
        """Whether the system has an event for bytes that were not received."""
        ...

    def prepare(self) -> int:
        """Continue the handshake; return the event that it waits for, or 0 once it is done."""
        ...

    def receive(self, targets: list[memoryview], *, fill: bool) -> int | None:
        """Receive bytes; return how many, 0 at the end, or None if there are none yet.

        Args:
            targets: where to put them.
            fill: whether it may wait for a few milliseconds until all targets are filled.
        """
        ...

    def send(self, writer: FrameWriter) -> bool:
        """Send what is waiting; return False when the socket accepts no more.

        Called by one thread at a time.
        """
        ...

    def send_patiently(self, pieces: list[Piece]) -> int | None:
        """Send some bytes; it may wait for a few milliseconds until the socket accepts them.

        Returns:
            How many were sent; None if the socket accepts no more.
        """
        ...

    def shut(self) -> None:
        """Close the connection for both sides; bytes that are already sent still arrive."""
        ...

    def close(self) -> None:
        """Close the descriptor."""
        ...


class PlainSocket:
    """A socket without encryption.

    Between processes of one host, waiting in the system for a few milliseconds at most saves many
    wake-ups. The network is slower, and would hold up other connections.
    """

    is_ready = True
    reports_rest = True

    def __init__(self, connected: socket.socket) -> None:
        self._is_local = connected.family == socket.AF_UNIX
        connected.setblocking(self._is_local)
        if self._is_local:
            for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
                connected.setsockopt(socket.SOL_SOCKET, option, _PATIENCE)
        self._socket = connected
        self.descriptor = connected.fileno()

    def prepare(self) -> int:
        """Return 0: plain sockets need no handshake."""
        return 0

    def receive(self, targets: list[memoryview], *, fill: bool) -> int | None:
        """Receive bytes; return how many, 0 at the end, or None if there are none yet."""
        flags = socket.MSG_WAITALL if fill and self._is_local else socket.MSG_DONTWAIT
        try:
            if len(targets) == 1:
                return self._socket.recv_into(targets[0], 0, flags)
            return self._socket.recvmsg_into(targets, 0, flags)[0]
        except BlockingIOError:
            return None

    def send(self, writer: FrameWriter) -> bool:
        """Send what is waiting; return False when the socket accepts no more."""
        while pieces := writer.pieces():
            try:
                writer.sent(self._socket.sendmsg(pieces[:_MAX_PIECES], (), _AT_ONCE))
            except BlockingIOError:
                return False
        return True

    def send_patiently(self, pieces: list[Piece]) -> int | None:
        """Send some bytes; return how many, or None if the socket accepts no more."""
        flags = socket.MSG_NOSIGNAL if self._is_local else _AT_ONCE
        try:
            return self._socket.sendmsg(pieces[:_MAX_PIECES], (), flags)
        except BlockingIOError:
            return None

    def shut(self) -> None:
        """Close the connection for both sides; bytes that are already sent still arrive."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the descriptor."""
        self._socket.close()


class ConnectionOwner(Protocol):
    """Uses a connection."""

    def on_frame(self, number: int, frame: memoryview) -> None:
        """Process a frame."""
        ...

    def has_room(self) -> bool:
        """Return whether more may be read; called with the connection's lock held."""
        ...

    def on_end(self, error: Exception | None) -> None:
        """Note that the connection is closed, because of an error unless this side closed it."""
        ...


class Connection:
    """Frames over a connected socket.

    Args:
        wire: the socket, which this object owns from now on.
        loop: waits for the socket.
        owner: takes the frames.
        sends: kind of the frames that are sent.
        takes: kind of the frames that are received.
        max_frame_bytes: longer frames are not read.
        read_bytes: how much is read at a time.

    Attributes:
        lock: held while writing.
        shut_down: whether the connection is closed, or about to be.
        n_bytes: how many bytes have been received, or sent after the socket was full: signs that
            the other side is alive.
        reader: finds the frames in what is received.
        writer: what is waiting to be sent.
    """

    def __init__(
        self,
        wire: Wire,
        loop: IoLoop,
        owner: ConnectionOwner,
        *,
        sends: int,
        takes: int,
        max_frame_bytes: int,
        read_bytes: int = BUFFER_BYTES,
    ) -> None:
        self.lock = threading.Lock()
        self.shut_down = False
        self.n_bytes = 0
        self.reader = FrameReader(takes, max_frame_bytes)
        self.writer = FrameWriter(sends)
        self._wire = wire
        self._loop = loop
        self._owner = owner
        self._read_bytes = read_bytes
        self._error: Exception | None = None
        self._ready = wire.is_ready
        # One thread at a time reads, and one sends what the socket did not accept at once.
        self._reading = False
        self._sending = False
        # Not read until the owner has room; by then some frames may already have been received.
        self._paused = False
        self._has_frames = False
        self._resumes = False
        # The socket accepts no more bytes at the moment.
        self._blocked = False
        self._finished = False

    def start(self) -> bool:
        """Start reading; return False if the loop has stopped.

        Raises:
            RuntimeError: if the system allows no thread.
        """
        with self.lock:
            if not self._loop.add(self._wire.descriptor, self):
                return False
            self._watch()
            return True

    def trust(self, max_frame_bytes: int) -> None:
        """Read as much as possible at a time, and longer frames."""
        self.reader.max_frame_bytes = max_frame_bytes
        self._read_bytes = BUFFER_BYTES

    def write(self, number: int, raw: WireBytes, *, urgent: bool = False) -> None:
        """Send a frame without waiting; called with the lock held.

        If the connection is broken, nothing happens: its owner is notified of that.
        """
        if self.shut_down:
            return
        self.writer.put(number, raw, urgent=urgent)
        if not self._blocked and self._ready and not self._send():
            self._watch()
        if self._paused and self._owner.has_room():
            self._paused = False
            self._watch()

    def shut(self, error: Exception | None = None) -> None:
        """Close the connection for both sides; the loop's threads do the rest."""
        with self.lock:
            self._shut_down(error)

    def abort(self) -> None:
        """Close the connection at once, unless a thread is reading it: then, after that."""
        with self.lock:
            self._shut_down(None)
            if self._reading or self._sending or self._finished:
                return
            self._finish()
        self._owner.on_end(None)

    def on_event(self, events: int, buffer: memoryview) -> None:
        """Send and read what is possible; called by the loop."""
        sends = self._blocked and self._starts_sending()
        if sends:
            self._guarded(self._send_rest)
        reads = self._starts_reading(events, has_sent=sends)
        if reads:
            self._guarded(partial(self._read, buffer))
        if self._ends(has_read=reads):
            self._owner.on_end(self._error)

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except (OSError, NotAFrame, MemoryError) as error:
            self.shut(error)

    def _send_rest(self) -> None:
        """Send what is waiting, without the lock, until the socket accepts no more."""
        while True:
            with self.lock:
                if self.shut_down:
                    return
                pieces = self.writer.pieces()
                if not pieces:
                    self._blocked = False
                    return
            sent = self._wire.send_patiently(pieces)
            if sent is None:
                return
            with self.lock:
                self.n_bytes += sent
                if not self.shut_down:
                    self.writer.sent(sent)

    def _starts_sending(self) -> bool:
        with self.lock:
            starts = self._blocked and self._ready and not (self._sending or self._finished)
            if starts:
                self._sending = True
                # Others may read while this thread sends.
                self._watch()
            return starts

    def _starts_reading(self, events: int, *, has_sent: bool) -> bool:
        with self.lock:
            if has_sent:
                self._sending = False
            self._paused = self._paused and not self._owner.has_room()
            if self._paused and events & BROKEN:
                self._shut_down(ConnectionResetError("the other side closed the connection"))
            only_sends = self._ready and not events & ~WRITE and not self._has_frames
            starts = not (self._reading or self._finished) and (
                self.shut_down or not (self._paused or only_sends)
            )
            if starts:
                self._resumes = self._has_frames
                self._reading, self._has_frames = True, False
                # Others may send while this thread reads.
                self._watch()
            return starts

    def _ends(self, *, has_read: bool) -> bool:
        """Watch for the next event, or close the descriptor if the connection is over."""
        with self.lock:
            if has_read:
                self._reading = False
            if self._finished:
                return False
            if self._reading or self._sending or not self.shut_down:
                self._watch()
                return False
            self._finish()
            return True

    def _read(self, buffer: memoryview) -> None:
        if self.shut_down or not (self._ready or self._prepare()):
            return
        if self._resumes and not self._pass_on():
            return
        for _ in range(_READS_PER_EVENT):
            window = buffer[: self._read_bytes]
            reader = self.reader
            targets = reader.targets(window)
            n_bytes = self._wire.receive(targets, fill=reader.is_in_fragment)
            if n_bytes is None:
                return
            if not n_bytes:
                raise ConnectionResetError("the other side closed the connection")
            self.n_bytes += n_bytes
            reader.add(n_bytes, window)
            if not self._pass_on():
                return
            if self._wire.reports_rest and n_bytes < len(targets[0]):
                return
        # Some bytes may already be decrypted, so that the socket has no event for them.
        self._has_frames = True

    def _pass_on(self) -> bool:
        """Pass on the frames that have been received; return False if no more may be read."""
        try:
            while (item := self.reader.next()) is not None:
                self._owner.on_frame(*item)
                with self.lock:
                    if self.shut_down:
                        return False
                    if not self._owner.has_room():
                        self._paused = self._has_frames = True
                        return False
            return True
        finally:
            self.reader.keep()

    def _prepare(self) -> bool:
        """Continue the handshake; return whether it is done."""
        waits_for = self._wire.prepare()
        with self.lock:
            self._ready = not waits_for
            self._blocked = waits_for == WRITE
            if self._ready:
                self._send()
            return self._ready

    def _send(self) -> bool:
        """Send what is waiting; return False if the socket accepts no more."""
        try:
            self._blocked = not self._wire.send(self.writer)
        except OSError as error:
            self._shut_down(error)
            self._blocked = False
        return not self._blocked

    def _watch(self) -> None:
        """Watch for what may happen next; called with the lock held."""
        events = WRITE if self._blocked and not self._sending else 0
        is_idle = not (self._reading or self._sending)
        if not self._reading and not self._paused:
            # A socket accepts bytes at almost any time, so this is a way to be called soon.
            events |= READ | (WRITE if self._has_frames else 0)
        # A broken socket always has an event, which threads that use it notice themselves.
        if not self._finished and (is_idle or (events and not self.shut_down)):
            self._loop.watch(self._wire.descriptor, events)

    def _shut_down(self, error: Exception | None) -> None:
        if self.shut_down:
            return
        self.shut_down, self._error = True, error
        self.writer.clear()
        self._wire.shut()
        # Reading finds the end of the connection.
        self._paused = False
        self._watch()

    def _finish(self) -> None:
        self._finished = True
        self._loop.remove(self._wire.descriptor)
        self._wire.close()


def describe(error: Exception | None, expected: str) -> str:
    """Return why a connection ended."""
    if isinstance(error, NotAFrame):
        return f"it sent bytes that are not {expected}, or {expected} that is too long"
    if isinstance(error, MemoryError):
        return "out of memory"
    return str(error) if error is not None else "the connection broke"
