"""Measures how much processor time a router takes, without the transport and the clock below it.

A router waits and starts threads through its clock, and moves bytes through its transport. The
meter wraps both, so it runs exactly while a thread is in the router, or in the task above it. The
same meter works in a simulation and in a real process::

    meter = CpuMeter()
    clock = MeteredClock(SystemClock(), meter)
    router = Router(transport=MeteredTransport(NngStreamTransport(), meter), clock=clock)
    clock.spawn(program, name="program")
    meter.cpu_s
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import ParamSpec, TypeVar

from dmiddleware.pipeline import Clock, Running
from dmiddleware.router.transport.stream import (
    Listener,
    OnBytes,
    OnConnection,
    OnSent,
    Piece,
    Stream,
    Transport,
)

P = ParamSpec("P")
T = TypeVar("T")


class CpuMeter:
    """Adds up the processor time of all threads while they are inside.

    Args:
        thread_time: the processor time of the calling thread, in seconds.
    """

    def __init__(self, *, thread_time: Callable[[], float] = time.thread_time) -> None:
        self._thread_time = thread_time
        self._local = threading.local()
        self._lock = threading.Lock()
        self._cpu_s = 0.0

    @property
    def cpu_s(self) -> float:
        """The seconds so far; a thread that is inside at this moment adds its own later."""
        return self._cpu_s

    def inside(self, function: Callable[P, T]) -> Callable[P, T]:
        """Return a function whose time counts."""

        def run(*args: P.args, **kwargs: P.kwargs) -> T:
            was_inside = self._switch(inside=True)
            try:
                return function(*args, **kwargs)
            finally:
                self._switch(inside=was_inside)

        return run

    def outside(self, function: Callable[P, T]) -> Callable[P, T]:
        """Return a function whose time does not count, although its caller's does."""

        def run(*args: P.args, **kwargs: P.kwargs) -> T:
            was_inside = self._switch(inside=False)
            try:
                return function(*args, **kwargs)
            finally:
                self._switch(inside=was_inside)

        return run

    def _switch(self, *, inside: bool) -> bool:
        """Let this thread be inside or not, and return whether it was."""
        since: float | None = getattr(self._local, "since", None)
        if inside != (since is not None):
            now = self._thread_time()
            self._local.since = now if inside else None
            if since is not None:
                with self._lock:
                    self._cpu_s += now - since
        return since is not None


class MeteredClock:
    """A clock whose threads and predicates count, but not its waits."""

    def __init__(self, clock: Clock, meter: CpuMeter) -> None:
        self._clock = clock
        self._meter = meter

    def now(self) -> float:
        return self._clock.now()

    def wall(self) -> float:
        return self._clock.wall()

    def wait_for(
        self,
        condition: threading.Condition,
        predicate: Callable[[], bool],
        timeout_s: float | None,
    ) -> bool:
        wait_for = self._meter.outside(self._clock.wait_for)
        return wait_for(condition, self._meter.inside(predicate), timeout_s)

    def spawn(self, function: Callable[[], None], *, name: str) -> Running:
        return self._clock.spawn(self._meter.inside(function), name=name)


class MeteredTransport:
    """A transport whose callbacks count, but not what it does itself."""

    def __init__(self, transport: Transport, meter: CpuMeter) -> None:
        self._transport = transport
        self._meter = meter

    def dial(self, address: str, *, timeout_s: float) -> Stream:
        dial = self._meter.outside(self._transport.dial)
        return MeteredStream(dial(address, timeout_s=timeout_s), self._meter)

    def listen(self, address: str, on_connection: OnConnection) -> Listener:
        def accept(stream: Stream) -> float | None:
            return on_connection(MeteredStream(stream, self._meter))

        return self._meter.outside(self._transport.listen)(address, self._meter.inside(accept))

    def close(self, *, timeout_s: float) -> bool:
        return self._meter.outside(self._transport.close)(timeout_s=timeout_s)


class MeteredStream:
    """A stream of a metered transport."""

    def __init__(self, stream: Stream, meter: CpuMeter) -> None:
        self._meter = meter
        self._send = meter.outside(stream.send)
        self._receive = meter.outside(stream.receive)
        self._close = meter.outside(stream.close)

    def send(self, pieces: Sequence[Piece], on_sent: OnSent) -> bool:
        return self._send(pieces, self._meter.inside(on_sent))

    def receive(self, targets: Sequence[memoryview], on_bytes: OnBytes) -> None:
        self._receive(targets, self._meter.inside(on_bytes))

    def close(self) -> None:
        self._close()
