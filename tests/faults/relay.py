"""A relay between a dialer and a listener, which can cut their connections."""

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
    """Accepts connections at one address, and forwards all bytes to another one.

    Args:
        front: the address to listen on, ``ipc``, ``tcp`` or ``tls+tcp``.
        back: the listener's address; if it does not listen, connections are closed.

    Attributes:
        passed: number of connections forwarded so far.
    """

    def __init__(self, front: str, back: str) -> None:
        self.passed = 0
        self._back = back
        self._lock = threading.Lock()
        self._closed = False
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._threads: list[threading.Thread] = []
        self._socket = _socket_for(front)
        self._socket.bind(_socket_address(front))
        self._socket.listen(64)
        self._spawn(self._accept)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        with self._lock:
            self._closed = True
        _shut_down(self._socket)
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
                _shut_down(end)

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
            far.connect(_socket_address(self._back))
            with self._lock:
                if self._closed:
                    return
                self._pairs.append((near, far))
                self.passed += 1
            backwards = threading.Thread(target=_forward, args=(far, near), daemon=True)
            backwards.start()
            _forward(near, far)
            backwards.join(_JOIN_S)
            with self._lock, contextlib.suppress(ValueError):
                self._pairs.remove((near, far))

    def _spawn(self, work: Callable[..., None], *arguments: socket.socket) -> None:
        thread = threading.Thread(target=work, args=arguments, name="relay", daemon=True)
        thread.start()
        self._threads.append(thread)


def _forward(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while content := source.recv(_TAKE):
            target.sendall(content)
    for end in (source, target):
        _shut_down(end)


def _socket_for(address: str) -> socket.socket:
    return socket.socket(socket.AF_UNIX if address.startswith("ipc://") else socket.AF_INET)


def _socket_address(address: str) -> str | tuple[str, int]:
    if address.startswith("ipc://"):
        return address.removeprefix("ipc://")
    host, _, port = address.partition("://")[2].rpartition(":")
    return host, int(port)


def _shut_down(end: socket.socket) -> None:
    # Its own thread closes it; closing it here could reuse the descriptor for another socket.
    with contextlib.suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)
