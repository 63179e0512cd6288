"""A relay between a dialer and a listener, whose connections can be cut."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from typing import Self

__all__ = ["Relay"]

_TAKE = 1 << 16
_JOIN_S = 10.0


class Relay:
    """Takes connections at one address, and passes all bytes on to another one.

    Args:
        front: where it listens, ``ipc`` or ``tcp``.
        back: the listener's address; whoever connects while nobody is there is hung up on.

    Attributes:
        passed: how many connections were passed on so far.
    """

    def __init__(self, front: str, back: str) -> None:
        self.passed = 0
        self._back = back
        self._lock = threading.Lock()
        self._closed = False
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._threads: list[threading.Thread] = []
        self._socket = _socket_for(front)
        self._socket.bind(_place(front))
        self._socket.listen(64)
        self._spawn(self._accept)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        with self._lock:
            self._closed = True
        _hang_up(self._socket)
        self.cut()
        for thread in self._threads:
            thread.join(_JOIN_S)

    def cut(self, n: int | None = None) -> None:
        """Cut the ``n`` oldest connections; None: all."""
        with self._lock:
            pairs = self._pairs[:n]
            del self._pairs[:n]
        for pair in pairs:
            for end in pair:
                _hang_up(end)

    def _accept(self) -> None:
        with self._socket:
            while True:
                try:
                    near, _ = self._socket.accept()
                except OSError:
                    return
                self._spawn(self._serve, near)

    def _serve(self, near: socket.socket) -> None:
        with near, _socket_for(self._back) as far, contextlib.suppress(OSError):
            far.connect(_place(self._back))
            with self._lock:
                if self._closed:
                    return
                self._pairs.append((near, far))
                self.passed += 1
            backwards = threading.Thread(target=_pass_on, args=(far, near), daemon=True)
            backwards.start()
            _pass_on(near, far)
            backwards.join(_JOIN_S)
            with self._lock, contextlib.suppress(ValueError):
                self._pairs.remove((near, far))

    def _spawn(self, work: Callable[..., None], *arguments: socket.socket) -> None:
        thread = threading.Thread(target=work, args=arguments, name="relay", daemon=True)
        thread.start()
        self._threads.append(thread)


def _pass_on(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while content := source.recv(_TAKE):
            target.sendall(content)
    for end in (source, target):
        _hang_up(end)


def _socket_for(address: str) -> socket.socket:
    return socket.socket(socket.AF_UNIX if address.startswith("ipc://") else socket.AF_INET)


def _place(address: str) -> str | tuple[str, int]:
    if address.startswith("ipc://"):
        return address.removeprefix("ipc://")
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    return host, int(port)


def _hang_up(end: socket.socket) -> None:
    # Closed by its own thread: before, its number could be given to another socket.
    with contextlib.suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)
