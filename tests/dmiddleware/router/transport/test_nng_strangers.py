"""What an nng listener allows connections that have not authenticated, and those that misbehave."""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import struct
from collections.abc import Callable, Iterator

import pytest

from dmiddleware.router.transport import ListenLimits, Reply
from dmiddleware.router.transport.nng import NngListener, NngTransport
from dmiddleware.router.transport.nng.parts import HEAD, PART, PART_BYTES
from tests.dmiddleware.router.endpoints import DEADLINE_S, NEVER_S
from tests.dmiddleware.router.unix_sockets import comes_true

REQUESTER = b"\x00SP\x00\x00\x30\x00\x00"
LIMITS = ListenLimits(
    max_frame_bytes=1 << 20, max_untrusted_frame_bytes=4096, handshake_s=0.5, max_untrusted=8
)


class Dialer:
    """A dialer that speaks nng's protocol on a plain socket."""

    def __init__(self, listener: NngListener) -> None:
        host, _, port = listener.address.removeprefix("tcp://").rpartition(":")
        self.socket = socket.create_connection((host, int(port)), DEADLINE_S)
        self.socket.sendall(REQUESTER)
        assert len(self.socket.recv(8, socket.MSG_WAITALL)) == 8

    def send(self, content: bytes, *, size: int | None = None, start: int = 0) -> None:
        """Send a part of a request that claims to have ``size`` bytes."""
        body = HEAD.pack(PART, 1, len(content) if size is None else size, start) + content
        head = struct.pack(">QI", len(body) + 4, 0x8000_0001)
        self.socket.sendall(head + body)

    def is_answered(self) -> bool:
        """Make a request; return whether it gets a reply."""
        try:
            self.send(b"?")
            return len(self.socket.recv(12 + HEAD.size + 1, socket.MSG_WAITALL)) > 0
        except ConnectionError:
            return False

    def is_closed(self) -> bool:
        """Wait until the listener closes the connection."""
        try:
            while self.socket.recv(1 << 16):
                pass
        except TimeoutError:
            return False
        except ConnectionError:
            pass
        return True


Dial = Callable[[NngListener], Dialer]


@pytest.fixture
def dial() -> Iterator[Dial]:
    with contextlib.ExitStack() as stack:

        def dial(listener: NngListener) -> Dialer:
            dialer = Dialer(listener)
            stack.callback(dialer.socket.close)
            return dialer

        yield dial


@contextlib.contextmanager
def limited(
    *,
    trusts: bool = False,
    serve: Callable[[memoryview], bytes] = bytes,
    handshake_s: float = LIMITS.handshake_s,
) -> Iterator[NngListener]:
    limits = dataclasses.replace(LIMITS, handshake_s=handshake_s)

    listeners: list[NngListener] = []

    def serve_and_trust(raw: memoryview, connection: int, reply: Reply) -> None:
        if trusts:
            listeners[0].trust(connection)
        reply(serve(raw))

    listener = NngTransport().listen(
        "tcp://127.0.0.1:0", serve_and_trust, on_disconnect=lambda _: None, limits=limits
    )
    listeners.append(listener)
    with contextlib.closing(listener):
        yield listener


def test_a_connection_that_does_not_authenticate_is_closed_in_time(dial: Dial) -> None:
    with limited() as listener:
        dialers = [dial(listener) for _ in range(3)]
        assert all(dialer.is_closed() for dialer in dialers)


def test_a_trusted_connection_stays_open(dial: Dial) -> None:
    with limited(trusts=True) as listener:
        trusted = dial(listener)
        assert trusted.is_answered()
        assert dial(listener).is_closed()
        trusted.socket.settimeout(0.2)
        assert not trusted.is_closed()


def test_of_too_many_connections_the_oldest_is_closed(dial: Dial) -> None:
    with limited(handshake_s=NEVER_S) as listener:
        dialers = [dial(listener) for _ in range(LIMITS.max_untrusted)]
        for dialer in dialers:
            dialer.is_answered()
        newest = [dial(listener) for _ in range(2)]
        assert all(dialer.is_answered() for dialer in newest)
        assert comes_true(lambda: sum(not dialer.is_answered() for dialer in dialers) == 2)


@pytest.mark.parametrize("trusts", [False, True])
def test_a_connection_that_does_not_read_its_replies_is_closed(dial: Dial, trusts: bool) -> None:
    with limited(trusts=trusts, handshake_s=NEVER_S, serve=lambda raw: bytes(100_000)) as listener:
        dialer = dial(listener)
        with pytest.raises(ConnectionError):
            while True:
                dialer.send(b"?")


@pytest.mark.parametrize(
    ("content", "size", "start"),
    [(4097, None, 0), (PART_BYTES, 1 << 40, 0), (10, 4096, 0), (10, 4096, 4086), (10, 0, 0)],
)
def test_a_part_that_is_not_valid_closes_its_connection(
    dial: Dial, content: int, size: int | None, start: int
) -> None:
    with limited(handshake_s=NEVER_S) as listener:
        dialer = dial(listener)
        dialer.send(bytes(content), size=size, start=start)
        assert dialer.is_closed()


def test_a_message_that_is_longer_than_a_part_closes_its_connection(dial: Dial) -> None:
    with limited(trusts=True) as listener:
        dialer = dial(listener)
        assert dialer.is_answered()
        dialer.send(bytes(PART_BYTES + 100))
        assert dialer.is_closed()
