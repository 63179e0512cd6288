"""Unix-domain sockets for tests: transports on either side, and bare sockets."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from dmiddleware.errors import TransportError
from dmiddleware.router.transport.framing import FrameWriter
from dmiddleware.router.transport.interface import Reply, RequestHandler
from dmiddleware.router.transport.socket_channel import SocketChannel
from dmiddleware.router.transport.socket_listener import SocketListener
from dmiddleware.router.transport.sockets import SocketTransport
from tests.dmiddleware.router.endpoints import unlimited
from tests.dmiddleware.router.request_handlers import echo

DEADLINE_S: Final = 20.0
MB: Final = 1 << 20
MAX_BYTES: Final = 16 * MB
HEAD: Final = struct.Struct("<4sB3xIQQ")

Outcome = memoryview | TransportError


@contextlib.contextmanager
def nothing_left() -> Iterator[None]:
    """Check that no threads and descriptors are left."""
    before, n_before = threads(), n_descriptors()
    yield
    # There may be fewer than before: nng may have closed some of its own.
    assert comes_true(lambda: threads() == before and n_descriptors() <= n_before), (
        threads(),
        before,
        n_descriptors(),
        n_before,
    )


def threads() -> list[str]:
    return sorted(one.name for one in threading.enumerate() if one.name.startswith("router-"))


def n_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def comes_true(predicate: Callable[[], bool], within_s: float = DEADLINE_S) -> bool:
    """Wait until a predicate is true; return whether it is."""
    deadline = time.monotonic() + within_s
    while not predicate():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


def listen(
    folder: Path,
    serve: RequestHandler = echo,
    on_disconnect: Callable[[int], None] = lambda _: None,
    max_frame_bytes: int = MAX_BYTES,
) -> contextlib.closing[SocketListener]:
    return contextlib.closing(
        SocketTransport().listen(
            f"ipc://{folder}/s",
            serve,
            on_disconnect=on_disconnect,
            limits=unlimited(max_frame_bytes),
        )
    )


def dial(folder: Path, reply_timeout_s: float = DEADLINE_S) -> contextlib.closing[SocketChannel]:
    return contextlib.closing(
        SocketTransport().dial(
            f"ipc://{folder}/s",
            connect_timeout_s=DEADLINE_S,
            reply_timeout_s=reply_timeout_s,
            max_frame_bytes=MAX_BYTES,
        )
    )


@contextlib.contextmanager
def bare_dial(folder: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as made:
        made.settimeout(DEADLINE_S)
        made.connect(f"{folder}/s")
        yield made


@contextlib.contextmanager
def bare_listen(folder: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as made:
        made.settimeout(DEADLINE_S)
        made.bind(f"{folder}/s")
        made.listen()
        yield made


def framed(kind: int, number: int, content: bytes) -> bytes:
    """Return the bytes of a frame on a connection."""
    writer, stream = FrameWriter(kind), bytearray()
    writer.put(number, content, urgent=False)
    while pieces := writer.pieces():
        stream += b"".join(pieces)
        writer.sent(sum(map(len, pieces)))
    return bytes(stream)


def read_frame(made: socket.socket, kind: int = 1) -> tuple[int, bytes]:
    """Read a frame, whose fragments are not interrupted by another one."""
    content = bytearray()
    while True:
        magic, its_kind, size, number, total = HEAD.unpack(exactly(made, HEAD.size))
        assert (magic, its_kind) == (b"DMWU", kind)
        content += exactly(made, size)
        if len(content) == total:
            return number, bytes(content)


def exactly(made: socket.socket, n: int) -> bytes:
    content = bytearray()
    while len(content) < n:
        received = made.recv(n - len(content))
        assert received
        content += received
    return bytes(content)


def is_hung_up_on(made: socket.socket) -> bool:
    try:
        return made.recv(1) == b""
    except ConnectionError:
        return True


class OutcomeRecorder:
    """Records the outcomes of requests, in order."""

    def __init__(self) -> None:
        self.got: list[bytes | TransportError] = []

    def __call__(self, answer: Outcome) -> None:
        self.got.append(answer if isinstance(answer, TransportError) else bytes(answer))

    def wait(self, n: int) -> list[bytes | TransportError]:
        assert comes_true(lambda: len(self.got) >= n), len(self.got)
        return self.got


class BlockingHandler:
    """A request handler that blocks until it is released."""

    def __init__(self) -> None:
        self.began = threading.Event()
        self.release = threading.Event()
        self.served: list[bytes] = []

    def __call__(self, raw: memoryview, connection: int, reply: Reply) -> None:
        self.began.set()
        assert self.release.wait(DEADLINE_S)
        self.served.append(bytes(raw[:8]))
        reply(bytes(raw))
