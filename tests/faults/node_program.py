"""A node of a fault test: ``python -m tests.faults.node_program '<NodeSpec as JSON>'``.

It sends and receives as its spec says, and records everything in its ledger. It reads commands
from stdin: ``send`` (start), ``enough`` (send no more), ``status`` and ``stop``. When stdin ends it
stops as well, so no node outlives its test.
"""

from __future__ import annotations

import dataclasses
import gc
import os
import sys
import threading
import time
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from dmiddleware.errors import DeliveryTimeout, RouterError
from dmiddleware.pipeline import Event, SystemClock
from dmiddleware.router import NodeOptions, Router
from dmiddleware.router.transport.nng_stream import NngStreamTransport
from dmiddleware.router.transport.shared_memory import MIN_BYTES, SharedMemory
from dmiddleware.router.transport.tls import TlsFiles
from dmiddleware.router.wire.envelope import EncodedEvent
from tests.accepting import accepting
from tests.faults.bus_stub import BusRouter
from tests.faults.ledger import Writer
from tests.router_state import n_refused

__all__ = ["NodeSpec", "Sends"]

LONGEST_LIFE_S = 3600.0


@dataclass(frozen=True, kw_only=True)
class Sends:
    """The messages that a node sends.

    Attributes:
        event: the event's name.
        delivery: its delivery contract.
        acknowledged: when the receiver acknowledges it.
        count: number of messages; 0: until the node is stopped.
        size: bytes per message.
        pace_s: pause between messages.
        timeout_s: how long a message waits for room before it is sent again.
    """

    event: str = "e"
    delivery: str = "reliable"
    acknowledged: str = "accepted"
    count: int = 0
    size: int = 1024
    pace_s: float = 0.0
    timeout_s: float = 60.0


@dataclass(frozen=True, kw_only=True)
class NodeSpec:
    """The settings of a node.

    Attributes:
        node_id: its number.
        ledger: the file of its ledger.
        listen: the address to listen on.
        dial: the addresses to dial.
        key: the run's key in hex; empty: none.
        roles: its roles.
        receives: the events that it subscribes to.
        slow_s: seconds that it takes per event.
        echo: whether it answers each ``ping`` with a ``pong``.
        sends: the messages that it sends; None: none.
        at_once: whether it starts sending without the command.
        expected: number of peers that must be ready before it sends.
        on_bus: whether it uses the stub that loses messages instead of the router.
        tls: certificates for ``tls+tcp``; None: none.
        shared: folder for large messages in shared memory; empty: none.
        shared_from: bytes from which a frame counts as large.
        shared_bytes: how much shared memory this node may use.
        options: arguments of :class:`NodeOptions`.
        start_timeout_s: how long it waits for its peers.
        clock_offset_s: seconds by which its clock's date differs from the host's.
    """

    node_id: int
    ledger: str
    listen: str = ""
    dial: tuple[str, ...] = ()
    key: str = ""
    roles: tuple[str, ...] = ()
    receives: tuple[str, ...] = ()
    slow_s: float = 0.0
    echo: bool = False
    sends: Sends | None = None
    at_once: bool = False
    expected: int = 0
    on_bus: bool = False
    tls: TlsFiles | None = None
    shared: str = ""
    shared_from: int = MIN_BYTES
    shared_bytes: int = 64 << 20
    options: dict[str, Any] = field(default_factory=dict)
    start_timeout_s: float = 60.0
    clock_offset_s: float = 0.0


class _OffsetClock(SystemClock):
    """A clock whose date is wrong.

    Args:
        offset_s: seconds by which it differs.
    """

    def __init__(self, offset_s: float) -> None:
        self._offset_s = offset_s

    def wall(self) -> float:
        return super().wall() + self._offset_s


class _Node:
    """One run of the program."""

    def __init__(self, spec: NodeSpec, write: Writer) -> None:
        self._spec = spec
        self._write = write
        self._start = os.getpid()
        self._may_send = threading.Event()
        self._stopped = threading.Event()
        self._pong = threading.Condition()
        self._pongs = 0
        make = BusRouter if spec.on_bus else Router
        self._router = make(
            node_id=spec.node_id,
            listen=spec.listen,
            dial=spec.dial,
            roles=spec.roles,
            key=bytes.fromhex(spec.key) or None,
            transport=NngStreamTransport(tls=spec.tls),
            shared_memory=_shared_memory(spec),
            options=NodeOptions(**spec.options),
            expected_peers=spec.expected,
            start_timeout_s=spec.start_timeout_s,
            clock=_OffsetClock(spec.clock_offset_s),
        )
        self._router.attach(accepting(self._deliver, waits=True))
        for name in (*spec.receives, *(("ping", "pong") if spec.echo else ())):
            self._router.subscribe(name, active=True)

    def run(self) -> None:
        """Run until stdin says stop, or ends."""
        sender = threading.Thread(target=self._send, name="sender", daemon=True)
        with self._router:
            self._write("listening", self._router.address)
            sender.start()
            if self._spec.at_once:
                self._may_send.set()
            for line in sys.stdin:
                command = line.strip()
                if command == "stop":
                    break
                if command == "send":
                    self._may_send.set()
                elif command == "enough":
                    self._stopped.set()
                elif command == "status":
                    self._status()
            self._stopped.set()
            self._may_send.set()
            sender.join(10.0)
            undelivered = self._router.close(deadline_s=10.0)
        self._write("closed", undelivered)

    def _deliver(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if name.startswith("node."):
            self._write(name, args[0], kwargs.get("reason", ""))
        elif name == "ping":
            self._router.emit(Event("pong"), args, {})
        elif name == "pong":
            with self._pong:
                self._pongs = args[2]
                self._pong.notify_all()
        else:
            sender, start, number, checksum, payload = args
            whole = zlib.crc32(payload) == checksum and _number_in(payload) == number
            if self._spec.slow_s:
                threading.Event().wait(self._spec.slow_s)
            self._write("got", name, sender, start, number, whole)

    def _send(self) -> None:
        try:
            self._router.wait_until_ready()
            self._write("ready", self._start)
            self._may_send.wait(LONGEST_LIFE_S)
            sends = self._spec.sends
            if sends is not None and not self._stopped.is_set():
                self._send_all(sends)
        except RouterError as error:
            self._write("error", type(error).__name__, str(error))

    def _send_all(self, sends: Sends) -> None:
        event = Event(
            sends.event,
            delivery=sends.delivery,
            acknowledged=sends.acknowledged,
            timeout_s=sends.timeout_s,
        )
        random = np.random.default_rng(self._start)
        payload = random.integers(0, 256, max(8, sends.size), np.uint8)
        number = 0
        while not self._stopped.is_set() and number < (sends.count or sys.maxsize):
            payload[:8] = np.frombuffer(number.to_bytes(8, "little"), np.uint8)
            args = (self._spec.node_id, self._start, number, zlib.crc32(payload), payload)
            if sends.event == "ping":
                self._ping(event, args)
            elif not self._emit(event, args):
                continue
            number += 1
            if sends.pace_s:
                self._stopped.wait(sends.pace_s)
        self._write("sent all", number)

    def _emit(self, event: Event, args: tuple[Any, ...]) -> bool:
        started_at = time.monotonic()
        try:
            self._router.emit(event, args, {})
        except DeliveryTimeout as error:
            self._write("refused", str(error))
            return False
        if event.delivery == "latest":
            self._write("published", time.monotonic() - started_at)
        waiting = sum(peer.waiting for peer in self._router.peer_traffic().values())
        self._write("sent", event.name, started_at, args[2], waiting)
        return True

    def _ping(self, event: Event, args: tuple[Any, ...]) -> None:
        started_at = time.perf_counter()
        with self._pong:
            self._router.emit(event, args, {})
            if self._pong.wait_for(lambda: self._pongs == args[2], 10.0):
                self._write("round trip", time.perf_counter() - started_at)
            else:
                self._write("no answer", args[2])

    def _status(self) -> None:
        router = self._router
        copies = sum(isinstance(x, EncodedEvent) and x.size > 10_000 for x in gc.get_objects())
        self._write(
            "status",
            {
                "refused": n_refused(router),
                "peers": router.peer_ids(),
                "copies": copies,
                "io_threads": sum(
                    thread.name.startswith("router-io") for thread in threading.enumerate()
                ),
                "traffic": {name: dataclasses.asdict(x) for name, x in router.traffic().items()},
                "peer_traffic": {
                    node: dataclasses.asdict(x) for node, x in router.peer_traffic().items()
                },
            },
        )


def _number_in(payload: np.ndarray[Any, Any]) -> int:
    return int.from_bytes(payload[:8].tobytes(), "little")


def _shared_memory(spec: NodeSpec) -> SharedMemory | None:
    if not spec.shared:
        return None
    return SharedMemory(Path(spec.shared), min_bytes=spec.shared_from, max_bytes=spec.shared_bytes)


def main() -> None:
    spec = msgspec.json.decode(sys.argv[1], type=NodeSpec)
    with Writer(Path(spec.ledger)) as write:
        write("started", os.getpid())
        _Node(spec, write).run()


if __name__ == "__main__":
    main()
