"""A learner and its collectors, for the benchmark of many nodes.

:class:`Learner` and :class:`Collector` run as threads of a simulated cluster. They also run in
processes, with the arguments of nodes_program.py: ``python many_nodes_program.py MODE …``.

- ``hub ADDRESS``: the learner. It reads commands from its standard input and answers each with a
  line of JSON; see :class:`LearnerProcess`.
- ``peers ADDRESS FIRST COUNT``: collectors with node ids from FIRST on, each with its own router.

Both end when their standard input is closed.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections import deque
from typing import Any, Final

import numpy as np

from dmiddleware.pipeline import (
    Clock,
    Context,
    CurrentNode,
    Event,
    SystemClock,
    Task,
    running_as,
)
from dmiddleware.router import Router
from dmiddleware.router.transport.nng_stream import NngStreamTransport
from tests.benchmarks.cpu_meter import CpuMeter, MeteredClock, MeteredTransport

KEY: Final = bytes(range(32))
BATCH: Final = Event("batch", timeout_s=60.0)
WEIGHTS: Final = Event("weights", delivery="latest")
LOAD: Final = Event("load")

LEAD_S: Final = 0.5
"""How long after the learner's order the collectors begin to send."""

FORM_S: Final = 60.0
LIFETIME_S: Final = 600.0
_ACKNOWLEDGE_S: Final = 0.5
_WEIGHTS_S: Final = 1.5
_LOOK_S: Final = 0.01
_GOLDEN_RATIO: Final = (5**0.5 - 1) / 2


class Learner:
    """The hub: counts the batches that its task receives.

    Args:
        router: connects it to the collectors.
        clock: times its waits.

    Attributes:
        formed_at: when its first step began, for which it waits for all collectors.
        n_batches: how many batches its handler has received.
    """

    def __init__(self, router: Router, clock: Clock) -> None:
        self.formed_at: float | None = None
        self.n_batches = 0
        self._router = router
        self._clock = clock
        self._is_over = False
        self._changed = threading.Condition()

    def run(self) -> None:
        """Run the task until the end."""
        node = CurrentNode(router=self._router, clock=self._clock)
        with self._router, running_as(node), Task(Context()) as task:
            task.on(BATCH, self._take)
            task.use(self._wait).run(max_step=1)

    def order(self, n_bytes: int, period_s: float, count: int) -> None:
        """Let every collector send ``count`` batches, one in each period; 0 ends the collectors."""
        self._router.emit(LOAD, (n_bytes, period_s, count), {})

    def end(self) -> None:
        """End the task, once the collectors have ended."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    def publish(self, version: int, weights: np.ndarray[Any, Any]) -> None:
        """Send weights to all collectors."""
        self._router.emit(WEIGHTS, (version, weights), {})

    def _take(self, content: np.ndarray[Any, Any]) -> None:
        self.n_batches += 1

    def _wait(self, ctx: Context) -> None:
        self.formed_at = self._clock.now()
        with self._changed:
            self._clock.wait_for(self._changed, lambda: self._is_over, LIFETIME_S)


class Collector:
    """Sends batches when the learner orders them.

    Args:
        router: connects it to the learner.
        clock: times its waits.

    Attributes:
        formed_at: when its first step began.
    """

    def __init__(self, router: Router, clock: Clock) -> None:
        self.formed_at: float | None = None
        self._router = router
        self._clock = clock
        # Evenly distributed, however many there are.
        self._phase = router.node_id * _GOLDEN_RATIO % 1.0
        self._orders: deque[tuple[int, float, int]] = deque()
        self._changed = threading.Condition()

    def run(self) -> None:
        """Run the task until the end."""
        node = CurrentNode(router=self._router, clock=self._clock)
        with self._router, running_as(node), Task(Context()) as task:
            task.on(LOAD, self._take)
            task.on(WEIGHTS, lambda version, weights: None)
            task.use(self._send_batches).run()

    def _take(self, n_bytes: int, period_s: float, count: int) -> None:
        with self._changed:
            self._orders.append((n_bytes, period_s, count))
            self._changed.notify_all()

    def _send_batches(self, ctx: Context) -> None:
        """Obey one order."""
        if self.formed_at is None:
            self.formed_at = self._clock.now()
        with self._changed:
            self._clock.wait_for(self._changed, lambda: bool(self._orders), LIFETIME_S)
            n_bytes, period_s, count = self._orders.popleft()
        if not count:
            ctx.task.stop("the measurement is over", only_local=True)
            return
        batch = random_bytes(n_bytes)
        first_at = self._clock.now() + LEAD_S + self._phase * period_s
        for number in range(count):
            with self._changed:
                wait_s = first_at + number * period_s - self._clock.now()
                self._clock.wait_for(self._changed, lambda: False, max(wait_s, 0.0))
            ctx.task.emit(BATCH, batch)


def random_bytes(size: int) -> np.ndarray[Any, Any]:
    """Return an array of ``size`` bytes."""
    return np.random.default_rng(0).integers(0, 255, size, dtype=np.uint8)


class LearnerProcess:
    """A process that runs the learner over tcp, and measures the processor time that it takes.

    Args:
        address: where it listens.
    """

    def __init__(self, address: str) -> None:
        self._meter = CpuMeter()
        self._clock = MeteredClock(SystemClock(), self._meter)
        self.router = Router(
            listen=address,
            key=KEY,
            clock=self._clock,
            transport=MeteredTransport(NngStreamTransport(), self._meter),
        )
        self._learner = Learner(self.router, self._clock)

    def form(self, n_collectors: int) -> dict[str, float]:
        """Wait for the collectors."""
        events = (LOAD.name, WEIGHTS.name)
        self.router.wait_for_peers(n_collectors, timeout_s=FORM_S, events=events)
        return {"n_collectors": n_collectors}

    def idle(self, seconds: float) -> dict[str, float]:
        """Measure the time that passes without an event."""
        before = self._times()
        time.sleep(seconds)
        return self._since(before)

    def batches(self, n_bytes: int, period_s: float, count: int) -> dict[str, float]:
        """Measure the batches of all collectors, until the last has arrived."""
        awaited = self._learner.n_batches + count * len(self.router.peer_ids())
        self._learner.order(n_bytes, period_s, count)
        time.sleep(LEAD_S / 2)
        before = self._times()
        time.sleep(LEAD_S / 2)
        began = time.perf_counter()
        _wait_until(lambda: self._learner.n_batches >= awaited, LIFETIME_S / 10)
        taken = time.perf_counter() - began
        time.sleep(_ACKNOWLEDGE_S)
        return self._since(before) | {"taken_s": taken}

    def weights(self, version: int, n_bytes: int) -> dict[str, float]:
        """Measure the publication of weights."""
        weights = random_bytes(n_bytes)
        before = self._times()
        self._meter.inside(self._learner.publish)(version, weights)
        time.sleep(_WEIGHTS_S)
        return self._since(before)

    def serve(self) -> None:
        """Obey the commands on standard input."""
        self._clock.spawn(self._learner.run, name="learner")
        _wait_until(lambda: bool(self.router.address), FORM_S)
        print(json.dumps({"address": self.router.address}), flush=True)
        for line in sys.stdin:
            name, *arguments = json.loads(line)
            print(json.dumps(getattr(self, name)(*arguments)), flush=True)
        os._exit(0)  # the collectors end by themselves

    def _times(self) -> tuple[float, float, float]:
        return time.perf_counter(), time.process_time(), self._meter.cpu_s

    def _since(self, before: tuple[float, float, float]) -> dict[str, float]:
        names = ("seconds", "process_s", "router_s")
        ended = self._times()
        return {name: end - start for name, start, end in zip(names, before, ended, strict=True)}


def _wait_until(predicate: Any, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not predicate():
        if time.monotonic() > deadline:
            raise TimeoutError(f"the benchmark waited {timeout_s:g} s in vain")
        time.sleep(_LOOK_S)


def run_collectors(address: str, first: int, count: int) -> None:
    """Run several collectors until standard input is closed."""
    for number in range(first, first + count):
        router = Router(
            node_id=number, dial=[address], key=KEY, expected_peers=1, start_timeout_s=FORM_S
        )
        collector = Collector(router, SystemClock())
        threading.Thread(target=collector.run, daemon=True).start()
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    if sys.argv[1] == "hub":
        LearnerProcess(sys.argv[2]).serve()
    else:
        run_collectors(sys.argv[2], *map(int, sys.argv[3:]))
