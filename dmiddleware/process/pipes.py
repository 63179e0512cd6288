"""Messages and open files between two processes of one program, with deadlines."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import time
from collections.abc import Callable

__all__ = ["MessagePipe", "PipeClosed", "deadline_in", "read_available"]

_HEADER = struct.Struct("=Q")
_CHUNK = 1 << 20


class PipeClosed(ConnectionError):
    """The other end is closed."""


def deadline_in(seconds: float) -> float:
    """Return the time on the monotonic clock in ``seconds`` from now."""
    return time.monotonic() + seconds


class MessagePipe:
    """Sends and receives whole messages over a stream socket.

    Args:
        sock: a connected stream socket; the pipe owns it.
        is_peer_alive: called about once a second while waiting, because a process that the peer
            started may hold the socket open after the peer has died; None relies on the socket.
    """

    def __init__(
        self, sock: socket.socket, *, is_peer_alive: Callable[[], bool] | None = None
    ) -> None:
        self._sock = sock
        self._is_peer_alive = is_peer_alive

    def fileno(self) -> int:
        """Return the socket's file descriptor."""
        return self._sock.fileno()

    def send(self, message: bytes, *, deadline: float | None = None) -> None:
        """Send one message.

        Args:
            message: any bytes.
            deadline: on the monotonic clock; None means no limit.

        Raises:
            PipeClosed: if the other end is closed.
            TimeoutError: if the other end does not read it before the deadline.
        """
        try:
            self._sock.settimeout(_remaining(deadline))
            self._sock.sendall(_HEADER.pack(len(message)) + message)
        except TimeoutError:
            raise
        except OSError as error:
            raise PipeClosed from error

    def receive(self, *, deadline: float | None = None) -> bytes:
        """Wait for one message.

        Args:
            deadline: on the monotonic clock; None means no limit.

        Raises:
            PipeClosed: if the other end is closed, possibly in the middle of a message.
            TimeoutError: if no complete message arrives before the deadline.
        """
        (size,) = _HEADER.unpack(self._receive_exactly(_HEADER.size, deadline))
        return self._receive_exactly(size, deadline)

    def send_fd(self, fd: int, *, deadline: float | None = None) -> None:
        """Send an open file; the receiver gets its own descriptor."""
        try:
            self._sock.settimeout(_remaining(deadline))
            socket.send_fds(self._sock, [b"\0"], [fd])
        except TimeoutError:
            raise
        except OSError as error:
            raise PipeClosed from error

    def receive_fd(self) -> int:
        """Wait for an open file; the caller owns the descriptor, which no child inherits."""
        self._sock.settimeout(None)
        data, fds, _, _ = socket.recv_fds(self._sock, 1, 1)
        if not data or not fds:
            raise PipeClosed
        os.set_inheritable(fds[0], False)
        return fds[0]

    def wait_until_closed(self, *, deadline: float | None = None) -> bool:
        """Wait until the other end is closed; messages that arrive meanwhile are not read.

        Returns:
            Whether it is closed; False if the deadline passed first.
        """
        poll = select.poll()
        # No events are requested: a hang-up is always reported.
        poll.register(self._sock.fileno(), 0)
        remaining = _remaining(deadline)
        return bool(poll.poll(None if remaining is None else remaining * 1000))

    def close(self) -> None:
        """Close this end; a second call does nothing."""
        with contextlib.suppress(OSError):
            self._sock.close()

    def _receive_exactly(self, size: int, deadline: float | None) -> bytes:
        parts: list[bytes] = []
        missing = size
        while missing:
            part = self._receive_some(min(missing, _CHUNK), deadline)
            if not part:
                raise PipeClosed
            if len(part) == size:
                return part
            parts.append(part)
            missing -= len(part)
        return b"".join(parts)

    def _receive_some(self, size: int, deadline: float | None) -> bytes:
        while True:
            remaining = _remaining(deadline)
            if self._is_peer_alive is None:
                slice_s = remaining
            else:
                slice_s = 1.0 if remaining is None else min(remaining, 1.0)
            self._sock.settimeout(slice_s)
            try:
                return self._sock.recv(size)
            except TimeoutError:
                if deadline is not None and time.monotonic() >= deadline:
                    raise
                if self._is_peer_alive is not None and not self._is_peer_alive():
                    raise PipeClosed from None
            except OSError as error:
                raise PipeClosed from error


def _remaining(deadline: float | None) -> float | None:
    # A timeout of zero would make the socket non-blocking.
    return None if deadline is None else max(deadline - time.monotonic(), 1e-4)


def read_available(fd: int, *, wait_s: float, limit: int = 1 << 16) -> str:
    """Read what another process has written to a pipe so far.

    Args:
        fd: the reading end.
        wait_s: how long to wait for the first byte; later bytes must arrive within 50 ms.
        limit: the maximum number of bytes.
    """
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    parts: list[bytes] = []
    while sum(map(len, parts)) < limit and poll.poll((0.05 if parts else wait_s) * 1000):
        part = os.read(fd, limit)
        if not part:
            break
        parts.append(part)
    return b"".join(parts).decode(errors="replace")
