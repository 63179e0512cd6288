"""Close streams while they connect, send and receive.

Run as ``python -m …stream_closing_program ADDRESS COUNT [CA CERT_AND_KEY NAME]``; prints how many
connections were made and closed. It is a separate program because nng may abort the process.
"""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final

from dmiddleware.errors import RouterError
from dmiddleware.router.transport.nng_stream import NngStreamTransport
from dmiddleware.router.transport.stream import Stream, Transport
from dmiddleware.router.transport.tls import TlsFiles
from tests.waiting import wait_until

N_THREADS: Final = 4
DEADLINE_S: Final = 60.0
CONTENT: Final = bytes(400_000)


class Side:
    """One side of a connection, which always sends and receives, and counts its callbacks."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.ended = threading.Event()
        self.has_moved = threading.Event()
        self.n_pending = 2
        self._lock = threading.Lock()
        self._buffer = memoryview(bytearray(100_000))
        stream.receive([self._buffer], self._on_bytes)
        self._send()

    def _send(self) -> None:
        # Another thread may close the connection meanwhile, which the callback reports.
        for _ in range(3):
            if not self.stream.send([b"head", CONTENT, b"tail"], self._on_sent):
                return
        self._end()

    def _on_sent(self, error: RouterError | None) -> None:
        if error is not None:
            self._end()
        else:
            self.has_moved.set()
            self._send()

    def _on_bytes(self, outcome: int | RouterError) -> None:
        if isinstance(outcome, int):
            self.has_moved.set()
            self.stream.receive([self._buffer], self._on_bytes)
        else:
            self._end()

    def _end(self) -> None:
        with self._lock:
            self.n_pending -= 1
            assert self.n_pending >= 0, "a callback came twice"
            if not self.n_pending:
                self.ended.set()


class Closer:
    """Dials, and closes the connections in four orders."""

    def __init__(self, transport: Transport, address: str, seed: int) -> None:
        self._transport = transport
        self._address = address
        self._random = random.Random(seed)
        self._orders: list[Callable[[Side], None]] = [
            self._at_once,
            self._soon,
            self._from_two_threads,
            self._when_the_peer_does,
        ]

    def run(self, count: int) -> None:
        for number in range(count):
            side = Side(self._transport.dial(self._address, timeout_s=DEADLINE_S))
            self._orders[number % len(self._orders)](side)
            assert side.ended.wait(DEADLINE_S), "a callback did not come"

    def _at_once(self, side: Side) -> None:
        side.stream.close()

    def _soon(self, side: Side) -> None:
        # It connects, or sends and receives, unless the listener closes it.
        side.ended.wait(self._random.uniform(0.0, 0.003))
        side.stream.close()

    def _from_two_threads(self, side: Side) -> None:
        side.ended.wait(self._random.uniform(0.0, 0.002))
        other = threading.Thread(target=side.stream.close)
        other.start()
        side.stream.close()
        other.join()

    def _when_the_peer_does(self, side: Side) -> None:
        self._soon(side)


def transport_of(*tls: str) -> Transport:
    files = TlsFiles(ca=tls[0], cert_and_key=tls[1], server_name=tls[2]) if tls else None
    return NngStreamTransport(tls=files)


def main(address: str, count: int, *tls: str) -> None:
    transport, dials = (transport_of(*tls) for _ in range(2))
    accepted: list[Side] = []
    rng = random.Random(0)

    def accept(stream: Stream) -> None:
        side = Side(stream)
        accepted.append(side)
        # The listener closes every second connection, often before the dialer does.
        if rng.random() < 0.5:
            stream.close()

    n_before = n_descriptors()
    listener = transport.listen(address, accept)
    closers = [
        threading.Thread(
            target=Closer(dials, listener.address, seed).run, args=(count // N_THREADS,)
        )
        for seed in range(N_THREADS)
    ]
    for closer in closers:
        closer.start()
    for closer in closers:
        closer.join()
    listener.close()

    def are_closed() -> bool:
        # The last one may be accepted after the listener was closed.
        for side in list(accepted):
            side.stream.close()
        # nng's own threads keep a few descriptors.
        return n_descriptors() <= n_before + 8 and "router-io" not in thread_names()

    wait_until(
        are_closed,
        lambda: f"{n_before} descriptors, not {n_descriptors()}, and the end of {thread_names()}",
        deadline_s=DEADLINE_S,
    )
    for side in accepted:
        assert side.ended.wait(DEADLINE_S), "a callback did not come"
    print(count // N_THREADS * N_THREADS)


def n_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def thread_names() -> list[str]:
    return [thread.name for thread in threading.enumerate()]


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:])
