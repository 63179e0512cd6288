"""What tests of byte streams share: one end of a connection, and the two ends of one."""

from __future__ import annotations

import contextlib
import queue
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from dmiddleware.errors import RouterError
from dmiddleware.router.transport.nng_stream import NngStreamTransport
from dmiddleware.router.transport.stream import Listener, Piece, Stream, Transport
from tests.dmiddleware.router.process_resources import threads
from tests.waiting import wait_until

__all__ = ["DEADLINE_S", "End", "StreamEndpoints", "accept", "start_nng"]

DEADLINE_S = 20.0


def accept(stream: Stream) -> None:
    """Receive everything from a connection that was accepted."""
    End(stream)


def start_nng() -> None:
    """Let nng start its threads, which keep a few descriptors open until the process ends."""
    with tempfile.TemporaryDirectory(prefix="nng-") as folder:
        stream = NngStreamTransport().dial(f"ipc://{folder}/nobody", timeout_s=DEADLINE_S)
        End(stream).ended()
        stream.close()
    wait_until(lambda: "router-io" not in threads(), "nng's dial to end")


class End:
    """One end of a connection, which keeps everything that arrives.

    Args:
        stream: the stream.
        buffer_bytes: how much is received at a time; 0: nothing is received until :meth:`read`.
    """

    def __init__(self, stream: Stream, *, buffer_bytes: int = 1 << 16) -> None:
        self.stream = stream
        self.threads: set[threading.Thread] = set()
        self.error: RouterError | None = None
        self.n_calls = 0
        self._received = bytearray()
        self._sent: list[RouterError | None] = []
        self._changed = threading.Condition()
        if buffer_bytes:
            self.read(buffer_bytes)

    def read(self, buffer_bytes: int) -> None:
        """Receive until the connection ends."""
        self._buffer = memoryview(bytearray(buffer_bytes))
        self.stream.receive([self._buffer], self._on_bytes)

    def send(self, *pieces: Piece) -> None:
        """Send pieces, and wait until they have been sent."""
        n_before = len(self._sent)
        if self.stream.send(pieces, self.on_sent):
            return
        self._wait_for(lambda: len(self._sent) > n_before)
        if (error := self._sent[-1]) is not None:
            raise error

    def received(self, n_bytes: int) -> bytes:
        """Wait until at least ``n_bytes`` bytes have arrived; return what has."""
        self._wait_for(lambda: len(self._received) >= n_bytes or self.error is not None)
        with self._changed:
            return bytes(self._received)

    def received_now(self) -> bytes:
        """Return what has arrived so far."""
        with self._changed:
            return bytes(self._received)

    def ended(self) -> RouterError:
        """Wait until nothing more is received, and return the reason."""
        self._wait_for(lambda: self.error is not None)
        assert self.error is not None
        return self.error

    def sends(self, n: int) -> list[RouterError | None]:
        """Wait for the outcomes of ``n`` sends that were not complete at once."""
        self._wait_for(lambda: len(self._sent) >= n)
        return self._sent

    def on_sent(self, error: RouterError | None) -> None:
        with self._changed:
            self.threads.add(threading.current_thread())
            self._sent.append(error)
            self._changed.notify_all()

    def _on_bytes(self, outcome: int | RouterError) -> None:
        with self._changed:
            self.threads.add(threading.current_thread())
            self.n_calls += 1
            if isinstance(outcome, int):
                self._received += self._buffer[:outcome]
                self.stream.receive([self._buffer], self._on_bytes)
            else:
                assert self.error is None
                self.error = outcome
            self._changed.notify_all()

    def _wait_for(self, predicate: Callable[[], bool]) -> None:
        with self._changed:
            assert self._changed.wait_for(predicate, DEADLINE_S), "nothing happened"


@dataclass
class Connecting:
    """A connection that may not have been accepted yet."""

    listener: Listener
    dialer: End
    _accepted: queue.SimpleQueue[End]

    def accepted(self) -> End:
        """Wait until it is accepted, and return the listener's end; call this once."""
        return self._accepted.get(timeout=DEADLINE_S)


@dataclass
class StreamEndpoints:
    """An address, the transport to listen with, and the transport to dial with."""

    address: str
    listens: Transport
    dials: Transport
    _open: list[Stream] = field(default_factory=list)

    @contextlib.contextmanager
    def listening(self, on_connection: Callable[[Stream], object]) -> Iterator[Listener]:
        """Listen; close all connections at the end."""
        is_over = threading.Event()

        def keep(stream: Stream) -> None:
            self._open.append(stream)
            on_connection(stream)
            if is_over.is_set():
                # It was accepted while the listener was closed.
                stream.close()

        with contextlib.closing(self.listens.listen(self.address, keep)) as listener:
            try:
                yield listener
            finally:
                listener.close()
                is_over.set()
                for stream in list(self._open):
                    stream.close()

    def dial(self, address: str, *, timeout_s: float = DEADLINE_S) -> Stream:
        """Dial an address; the connection is closed with the listener."""
        stream = self.dials.dial(address, timeout_s=timeout_s)
        self._open.append(stream)
        return stream

    @contextlib.contextmanager
    def connecting(self, *, buffer_bytes: int = 1 << 16) -> Iterator[Connecting]:
        """Listen, and dial once."""
        accepted: queue.SimpleQueue[End] = queue.SimpleQueue()

        def accept(stream: Stream) -> None:
            accepted.put(End(stream, buffer_bytes=buffer_bytes))

        with self.listening(accept) as listener:
            yield Connecting(listener, End(self.dial(listener.address)), accepted)

    @contextlib.contextmanager
    def connected(self, *, buffer_bytes: int = 1 << 16) -> Iterator[tuple[End, End]]:
        """Yield the two ends of a connection; only the dialer's has received something."""
        with self.connecting(buffer_bytes=buffer_bytes) as connecting:
            dialer, accepted = connecting.dialer, connecting.accepted()
            # What the listener sends shows the dialer that it is connected.
            accepted.send(b"!")
            dialer.received(1)
            dialer._received.clear()
            yield dialer, accepted
