"""Routers that share a folder, over a transport that counts bytes and can remove slabs."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dmiddleware.pipeline import Event
from dmiddleware.router import Router
from dmiddleware.router.transport.nng_stream import NngStreamTransport
from dmiddleware.router.transport.shared_memory import SharedMemory
from dmiddleware.router.transport.stream import (
    Listener,
    OnBytes,
    OnConnection,
    OnSent,
    Piece,
    Stream,
)
from tests.accepting import accepting
from tests.router_state import locked_node
from tests.waiting import wait_until

__all__ = [
    "DEADLINE_S",
    "KEY",
    "Node",
    "WatchedTransport",
    "array_of",
    "big",
    "is_in_a_file_of",
    "two_nodes",
]

KEY = bytes(range(32))
DEADLINE_S = 20.0


class WatchedTransport:
    """nng, but the bytes are counted.

    Attributes:
        sent: how many bytes each call has sent.
        on_bytes: called before bytes that have arrived are processed.
    """

    def __init__(self) -> None:
        self._inner = NngStreamTransport()
        self.sent: list[int] = []
        self.on_bytes: Callable[[], None] = lambda: None

    def close(self, *, timeout_s: float) -> bool:
        return self._inner.close(timeout_s=timeout_s)

    def dial(self, address: str, *, timeout_s: float) -> Stream:
        return _WatchedStream(self._inner.dial(address, timeout_s=timeout_s), self)

    def listen(self, address: str, on_connection: OnConnection) -> Listener:
        return self._inner.listen(
            address, lambda stream: on_connection(_WatchedStream(stream, self))
        )


class _WatchedStream:
    def __init__(self, inner: Stream, transport: WatchedTransport) -> None:
        self._inner = inner
        self._transport = transport
        self.close = inner.close

    def send(self, pieces: Sequence[Piece], on_sent: OnSent) -> bool:
        self._transport.sent.append(sum(map(len, pieces)))
        return self._inner.send(pieces, on_sent)

    def receive(self, targets: Sequence[memoryview], on_bytes: OnBytes) -> None:
        def watched(outcome: Any) -> None:
            self._transport.on_bytes()
            on_bytes(outcome)

        self._inner.receive(targets, watched)


class Node:
    """A router that keeps the events it receives.

    Args:
        memory: what it shares; None: nothing.
        settings: of the router.
    """

    def __init__(self, memory: SharedMemory | None, **settings: Any) -> None:
        self.transport = WatchedTransport()
        self.router = Router(key=KEY, transport=self.transport, shared_memory=memory, **settings)
        self.arrays: list[np.ndarray[Any, Any]] = []
        self.left: list[int] = []
        self._changed = threading.Condition()
        self.router.attach(accepting(self._deliver, waits=True))
        self.router.subscribe("big", active=True)

    def emit(self, array: np.ndarray[Any, Any], **declared: Any) -> None:
        """Emit an event with an array."""
        self.router.emit(Event("big", **declared), (array,), {})

    def received(self, n: int) -> list[np.ndarray[Any, Any]]:
        """Wait for ``n`` arrays in all, and return them."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.arrays) >= n, DEADLINE_S)
            return list(self.arrays)

    def shares_with(self, node_id: int) -> bool:
        """Return whether it shares memory with a peer."""
        with locked_node(self.router) as node:
            peer = node.peers.get(str(node_id))
            connection = None if peer is None else peer.connection
            sharing = None if connection is None else connection.sharing
            return sharing is not None and sharing.is_agreed

    def _deliver(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        with self._changed:
            if name == "big":
                self.arrays.append(args[0])
            elif name == "node.left":
                self.left.append(args[0])
            self._changed.notify_all()


@contextlib.contextmanager
def two_nodes(
    address: str,
    one: SharedMemory | None,
    other: SharedMemory | None,
    *,
    agree: bool = True,
    **settings: Any,
) -> Iterator[tuple[Node, Node]]:
    """Yield nodes 0, which listens, and 1, which dials, once they are connected.

    Args:
        address: where node 0 listens.
        one: what node 0 shares.
        other: what node 1 shares.
        agree: whether they have to share memory before.
        settings: of both routers.
    """
    listens = Node(one, listen=address, **settings)
    with listens.router:
        dials = Node(other, node_id=1, dial=[listens.router.address], **settings)
        with dials.router:
            for node in (listens, dials):
                node.router.wait_for_peers(1, timeout_s=DEADLINE_S, events=("big",))
            if agree:
                wait_until(
                    lambda: listens.shares_with(1) and dials.shares_with(0),
                    "both to agree to share memory",
                )
            yield listens, dials


def array_of(n_bytes: int, value: int = 1) -> np.ndarray[Any, Any]:
    return np.full(n_bytes, value, np.uint8)


def big(folder: Path) -> list[Path]:
    """Return the slabs in a folder."""
    found = []
    for path in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):
            if path.stat().st_size > 1000:
                found.append(path)
    return found


def is_in_a_file_of(folder: Path, array: np.ndarray[Any, Any]) -> bool:
    """Return whether an array is in memory that maps a file of a folder."""
    place = array.__array_interface__["data"][0]
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, _, end = line.split()[0].partition("-")
        if int(start, 16) <= place < int(end, 16):
            return str(folder) in line
    return False
