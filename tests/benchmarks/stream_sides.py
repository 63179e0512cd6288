"""The two sides of the benchmark of byte streams: messages one way, a byte for each of them back.

The far side is a process of its own: ``python -m tests.benchmarks.stream_sides KIND ADDRESS SIZE``.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Final, Protocol, Self

from dmiddleware.errors import RouterError
from dmiddleware.router.transport.nng_stream import NngStreamTransport
from dmiddleware.router.transport.stream import Stream

ROOT: Final = Path(__file__).resolve().parents[2]
BUFFER_BYTES: Final = 1 << 20
DEADLINE_S: Final = 60.0


class Sender(Protocol):
    """The near side."""

    def __init__(self, address: str, size: int) -> None: ...

    def send(self, n: int, *, in_flight: int) -> None:
        """Send ``n`` messages, and wait for their answers."""
        ...

    def close(self) -> None: ...


class NngSender:
    """Sends over nng's byte streams; the answers to earlier messages make it send the next ones."""

    def __init__(self, address: str, size: int) -> None:
        self._message = memoryview(bytearray(size))
        self._buffer = memoryview(bytearray(1024))
        self._done = threading.Semaphore(0)
        self._lock = threading.Lock()
        self._n_unsent = self._n_unanswered = self._in_flight = 0
        self._is_sending = False
        self._stream = NngStreamTransport().dial(address, timeout_s=DEADLINE_S)
        self._stream.receive([self._buffer], self._on_bytes)

    def send(self, n: int, *, in_flight: int) -> None:
        with self._lock:
            self._n_unsent, self._in_flight = n, in_flight
            self._send()
        if not self._done.acquire(timeout=DEADLINE_S):
            raise TimeoutError("the other side did not answer")

    def close(self) -> None:
        self._stream.close()

    def _on_bytes(self, n_bytes: int | RouterError) -> None:
        if not isinstance(n_bytes, int):
            return
        with self._lock:
            self._n_unanswered -= n_bytes
            self._send()
            if not self._n_unsent and not self._n_unanswered:
                self._done.release()
        self._stream.receive([self._buffer], self._on_bytes)

    def _send(self) -> None:
        while self._n_unsent and self._n_unanswered < self._in_flight and not self._is_sending:
            self._n_unsent -= 1
            self._n_unanswered += 1
            self._is_sending = not self._stream.send([self._message], self._on_sent)

    def _on_sent(self, error: RouterError | None) -> None:
        with self._lock:
            self._is_sending = False
            if error is None:
                self._send()


class PlainSender:
    """Sends over a plain socket, which blocks."""

    def __init__(self, address: str, size: int) -> None:
        self._message = memoryview(bytearray(size))
        self._socket = socket.socket(socket.AF_UNIX if address.startswith("/") else socket.AF_INET)
        self._socket.settimeout(DEADLINE_S)
        self._socket.connect(_target(address))
        _hurry(self._socket)

    def send(self, n: int, *, in_flight: int) -> None:
        n_answers = 0
        for number in range(n):
            self._socket.sendall(self._message)
            while number + 1 - n_answers >= in_flight:
                n_answers += len(self._socket.recv(1024))
        while n_answers < n:
            n_answers += len(self._socket.recv(1024))

    def close(self) -> None:
        self._socket.close()


class Side:
    """Runs the far side, and connects to it.

    Args:
        kind: ``nng`` or ``plain``.
        address: an address of nng, or a path, or a host and a port.
        size: the length of the messages.
    """

    def __init__(self, kind: str, address: str, size: int) -> None:
        command = [sys.executable, "-W", "ignore", "-m", __name__, kind, address, str(size)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
        )
        assert self._process.stdout is not None
        sender: type[Sender] = NngSender if kind == "nng" else PlainSender
        self._sender = sender(self._process.stdout.readline().strip(), size)

    def send(self, n: int, *, in_flight: int = 1) -> None:
        """Send ``n`` messages, and wait for their answers."""
        self._sender.send(n, in_flight=in_flight)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._sender.close()
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(DEADLINE_S)


class _Answers:
    """The far side of one stream of nng."""

    def __init__(self, stream: Stream, size: int) -> None:
        self._stream = stream
        self._size = size
        self._n_received = 0
        self._n_unsent = 0
        self._is_sending = False
        self._buffer = memoryview(bytearray(BUFFER_BYTES))
        stream.receive([self._buffer], self._on_bytes)

    def _on_bytes(self, n_bytes: int | RouterError) -> None:
        if not isinstance(n_bytes, int):
            self._stream.close()
            return
        self._n_received += n_bytes
        n_complete, self._n_received = divmod(self._n_received, self._size)
        self._n_unsent += n_complete
        self._send()
        self._stream.receive([self._buffer], self._on_bytes)

    def _send(self) -> None:
        while self._n_unsent and not self._is_sending:
            answers, self._n_unsent = bytes(self._n_unsent), 0
            self._is_sending = not self._stream.send([answers], self._on_sent)

    def _on_sent(self, error: RouterError | None) -> None:
        self._is_sending = False
        if error is None:
            self._send()


def _answer_plain(address: str, size: int) -> None:
    family = socket.AF_UNIX if address.startswith("/") else socket.AF_INET
    listener = socket.socket(family)
    listener.bind(_target(address))
    listener.listen()
    name = listener.getsockname()
    print(name if isinstance(name, str) else f"{name[0]}:{name[1]}", flush=True)
    accepted, _ = listener.accept()
    _hurry(accepted)
    buffer, n_received = bytearray(BUFFER_BYTES), 0
    while n_bytes := accepted.recv_into(buffer):
        n_received += n_bytes
        n_complete, n_received = divmod(n_received, size)
        if n_complete:
            accepted.sendall(bytes(n_complete))


def _target(address: str) -> str | tuple[str, int]:
    host, _, port = address.partition(":")
    return address if address.startswith("/") else (host, int(port))


def _hurry(connected: socket.socket) -> None:
    if connected.family == socket.AF_INET:
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def main(kind: str, address: str, size: int) -> None:
    if kind == "plain":
        with contextlib.suppress(OSError):
            _answer_plain(address, size)
        return
    listener = NngStreamTransport().listen(address, lambda stream: _keep(_Answers(stream, size)))
    print(listener.address, flush=True)
    sys.stdin.read()
    os._exit(0)


_kept: list[_Answers] = []
_keep = _kept.append

if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
