"""A learner with 1,000 collectors.

A learner and its collectors run as a simulated cluster in one process. The figures are from the
model of [Scaling](scaling.md), which also says how they are measured and what they leave out.

``BENCH_SMALL=1`` measures few collectors.
"""

from __future__ import annotations

import gc
import os
import random
import statistics
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from dmiddleware.pipeline import Clock
from dmiddleware.router import Router
from dmiddleware.router.transport.stream import Transport
from dmiddleware.testing import Simulation
from dmiddleware.testing.stream_network import StreamNetwork
from tests.benchmarks.bench_nodes import ROOT, bar, free_port, star
from tests.benchmarks.cpu_meter import CpuMeter, MeteredClock, MeteredTransport
from tests.benchmarks.hub_cost import HubCost, Line, Load
from tests.benchmarks.many_nodes_program import (
    FORM_S,
    KEY,
    LEAD_S,
    Collector,
    Learner,
    random_bytes,
)
from tests.benchmarks.report import Page, Row, machine, render_table

PROGRAM: Final = ROOT / "tests/benchmarks/many_nodes_program.py"
PAGE: Final = ROOT / "docs/scaling.md"

_SMALL = bool(os.environ.get("BENCH_SMALL"))
N_SIMULATED: Final = (5, 20) if _SMALL else (10, 100, 300, 1000)
N_REAL: Final = (1, 4) if _SMALL else (1, 16, 128)
REPEATS: Final = 1 if _SMALL else 2
BATCH_BYTES: Final = (1 << 10, 64 << 10, 256 << 10)
WEIGHTS_BYTES: Final = (100_000, 1_000_000)
REAL_RATE: Final = 1000
"""How many batches a second arrive in the measurement over tcp."""

LOAD: Final = Load(batches=1, batch_bytes=64 << 10, weights_bytes=1_000_000, weights_every_s=10)
"""What counts as a realistic load, for each collector."""

STEP_BYTES: Final = {"vectors": 64, "images": 84 * 84 * 4}
"""How many bytes an environment step takes in a batch: CartPole's rows, and four gray images."""

RELAY_COLLECTORS: Final = 64

_ADDRESS: Final = "tcp://127.0.0.1:25515"
"""Of the simulated hub. With tcp, the contents of events are signed, and the network ignores it."""

_SETTLE_S: Final = 3.0
_IDLE_S: Final = 4.0
_DELAY_S: Final = (0.0002, 0.002)
_MILLION: Final = 1e6


@dataclass(frozen=True, slots=True)
class Costs:
    """What a collector costs, in seconds of the hub's processor time.

    Attributes:
        idle_s: for each second.
        batch_s: for each batch, by its size.
        weights_s: for each version of the weights, by their size.
    """

    idle_s: float
    batch_s: Mapping[int, float]
    weights_s: Mapping[int, float]

    def __sub__(self, other: Costs) -> Costs:
        return Costs(
            self.idle_s - other.idle_s,
            {size: cost - other.batch_s[size] for size, cost in self.batch_s.items()},
            {size: cost - other.weights_s[size] for size, cost in self.weights_s.items()},
        )

    def __add__(self, other: Costs) -> Costs:
        return Costs(
            self.idle_s + other.idle_s,
            {size: cost + other.batch_s[size] for size, cost in self.batch_s.items()},
            {size: cost + other.weights_s[size] for size, cost in self.weights_s.items()},
        )

    def model(self) -> HubCost:
        """Return the linear model of these costs, through the smallest and the largest events."""
        batch, weights = sorted(self.batch_s.items()), sorted(self.weights_s.items())
        return HubCost(
            idle_s=self.idle_s,
            batch=Line.through(batch[0], batch[-1]),
            weights=Line.through(weights[0], weights[-1]),
        )


@dataclass(frozen=True, slots=True)
class Formed:
    """How a simulated cluster forms.

    Attributes:
        simulated_s: until the first step of every node, in simulated seconds.
        total_cpu_s: the processor time of all nodes and the simulation.
        hub_cpu_s: the processor time of the hub.
    """

    simulated_s: float
    total_cpu_s: float
    hub_cpu_s: float


@dataclass(frozen=True, slots=True)
class Real:
    """What a hub in a process of its own needs over tcp.

    Attributes:
        router: the time in the router and the task.
        below: the rest of the process: the system, and waking threads.
        flood: batches received each second by their size, when the collectors never wait.
        flood_s: seconds of the hub's processor time for each of these.
    """

    router: Costs
    below: Costs
    flood: Mapping[int, float]
    flood_s: Mapping[int, float]


def rows() -> tuple[list[Row], Page]:
    """Measure simulated clusters and real connections; return the rows and docs/scaling.md."""
    started = time.perf_counter()
    simulated = {n: simulate(n) for n in N_SIMULATED}
    real = {n: measure_real(n) for n in N_REAL}
    formed, costs = simulated[N_SIMULATED[-1]]
    cost = (costs + real[N_REAL[-1]].below).model()
    n = N_SIMULATED[-1]
    found = [
        bar(f"1 + {n:,} nodes form", formed.simulated_s, 5, "simulated s"),
        bar(
            f"{n:,} collectors, each 64 KB a second",
            cost.share(n, LOAD).total * 100,
            100,
            "% of a core",
        ),
    ]
    text = render_page(simulated, real, cost, duration_s=time.perf_counter() - started)
    return found, Page(PAGE, text)


class SimulatedStar:
    """A learner and collectors in a simulation; only the learner's time is measured.

    Args:
        simulation: runs them.
        n: the number of collectors.
    """

    def __init__(self, simulation: Simulation, n: int) -> None:
        self.meter = CpuMeter()
        self.n = n
        self._simulation = simulation
        delays = random.Random(0)
        network = StreamNetwork(
            clock=simulation, delay_s=lambda source, target: delays.uniform(*_DELAY_S)
        )
        clock = MeteredClock(simulation, self.meter)
        transport = MeteredTransport(network.transport("0"), self.meter)
        self.learner = Learner(_router(0, n, clock, transport), clock)
        self._collectors = [
            Collector(_router(number, 1, simulation, network.transport(str(number))), simulation)
            for number in range(1, n + 1)
        ]

    def form(self) -> Formed:
        """Start all nodes, and wait for their first steps."""
        started = time.process_time()
        run = self.meter.inside(self.learner.run)
        self._threads = [self._simulation.spawn(run, name="main", group="0")]
        for number, one in enumerate(self._collectors, start=1):
            self._threads.append(self._simulation.spawn(one.run, name="main", group=str(number)))
        everyone = [self.learner, *self._collectors]
        # Those that have formed already are not looked at again.
        waiting = everyone.copy()

        def formed() -> bool:
            while waiting and waiting[-1].formed_at is not None:
                waiting.pop()
            return not waiting

        if not self._simulation.wait_until(formed, FORM_S):
            raise RuntimeError(f"{len(waiting)} of {self.n + 1} nodes did not form")
        cpu_s = time.process_time() - started
        return Formed(max(one.formed_at or 0.0 for one in everyone), cpu_s, self.meter.cpu_s)

    def idle_s(self) -> float:
        """Return the hub's time for each collector and second."""
        return self._measure(_IDLE_S) / _IDLE_S / self.n

    def batch_s(self, n_bytes: int, idle_s: float, *, count: int) -> float:
        """Return the hub's time for a batch; each collector sends ``count`` in a second."""
        before = self.learner.n_batches
        self._run_on_hub(partial(self.learner.order, n_bytes, 1.0 / count, count))
        self._simulation.run_for(LEAD_S / 2)
        seconds = 2.0
        cpu_s = self._measure(seconds) - idle_s * self.n * seconds
        received = self.learner.n_batches - before
        if received != count * self.n:
            raise RuntimeError(f"{received} of {count * self.n} batches have arrived")
        return cpu_s / received

    def weights_s(self, version: int, n_bytes: int, idle_s: float) -> float:
        """Return the hub's time for sending weights, for each collector."""
        self._run_on_hub(partial(self.learner.publish, version, random_bytes(n_bytes)))
        return self._measure(1.0) / self.n - idle_s

    def settle(self) -> None:
        """Let everything end that belongs to the start."""
        self._simulation.run_for(_SETTLE_S)

    def end(self) -> None:
        """End all nodes in order."""
        self._run_on_hub(partial(self.learner.order, 0, 0.0, 0))
        self._wait_for_ends(1)
        self.learner.end()
        self._wait_for_ends(0)

    def _wait_for_ends(self, first: int) -> None:
        for thread in self._threads[first:]:
            if not thread.join(FORM_S):
                raise RuntimeError(f"a node of {self.n + 1} did not end")

    def _measure(self, seconds: float) -> float:
        before = self.meter.cpu_s
        self._simulation.run_for(seconds)
        return self.meter.cpu_s - before

    def _run_on_hub(self, function: partial[None]) -> None:
        self._simulation.spawn(self.meter.inside(function), name="order", group="0")


def simulate(n: int) -> tuple[Formed, Costs]:
    """Measure a simulated cluster of a learner and ``n`` collectors."""
    with Simulation() as simulation:
        cluster = SimulatedStar(simulation, n)
        formed = cluster.form()
        cluster.settle()
        count = max(2, 400 // n)
        with _without_garbage():
            idle_s = statistics.fmean(cluster.idle_s() for _ in range(REPEATS))
            batch: dict[int, list[float]] = {size: [] for size in BATCH_BYTES}
            weights: dict[int, list[float]] = {size: [] for size in WEIGHTS_BYTES}
            for repeat in range(REPEATS):
                for size in BATCH_BYTES:
                    batch[size].append(cluster.batch_s(size, idle_s, count=count))
                for size in WEIGHTS_BYTES:
                    weights[size].append(cluster.weights_s(repeat, size, idle_s))
        cluster.end()
    return formed, Costs(idle_s, _means(batch), _means(weights))


def measure_real(n: int) -> Real:
    """Measure a learner and ``n`` collectors in processes, connected over tcp."""
    with star(ROOT, f"tcp://127.0.0.1:{free_port()}", n, program=PROGRAM) as hub:
        hub.ask("form", n)
        time.sleep(_SETTLE_S)
        idle = hub.ask("idle", _IDLE_S)
        names = ("process_s", "router_s")
        idle_s = {name: idle[name] / idle["seconds"] for name in names}
        batch: dict[str, dict[int, list[float]]] = {
            name: {size: [] for size in BATCH_BYTES} for name in names
        }
        weights: dict[str, dict[int, list[float]]] = {
            name: {size: [] for size in WEIGHTS_BYTES} for name in names
        }
        count = max(1, REAL_RATE // n)
        for repeat in range(REPEATS):
            for size in BATCH_BYTES:
                found = hub.ask("batches", size, 1.0 / count, count)
                for name in names:
                    cpu_s = found[name] - idle_s[name] * found["seconds"]
                    batch[name][size].append(cpu_s / (count * n))
            for size in WEIGHTS_BYTES:
                found = hub.ask("weights", repeat, size)
                for name in names:
                    cpu_s = found[name] - idle_s[name] * found["seconds"]
                    weights[name][size].append(cpu_s / n)
        flood, flood_s = {}, {}
        for size in BATCH_BYTES:
            found = hub.ask("batches", size, 0.0, count)
            flood[size] = count * n / found["taken_s"]
            cpu_s = found["process_s"] - idle_s["process_s"] * found["seconds"]
            flood_s[size] = cpu_s / (count * n)
    whole, router = (
        Costs(idle_s[name] / n, _means(batch[name]), _means(weights[name])) for name in names
    )
    return Real(router, whole - router, flood, flood_s)


def render_page(
    simulated: Mapping[int, tuple[Formed, Costs]],
    real: Mapping[int, Real],
    cost: HubCost,
    *,
    duration_s: float,
) -> str:
    """Return the measured part of docs/scaling.md."""
    most = cost.most_collectors(LOAD)
    share = cost.share(1000, LOAD)
    n_bytes = 10_000 * LOAD.batches * LOAD.batch_bytes
    verdict = "carries" if share.total <= 1 else "does not carry"
    parts = [
        f"- Machine: {machine()}\n"
        "- Command: `python -m tests.benchmarks many_nodes --write` "
        f"({duration_s / 60:.0f} minutes)\n",
        "### Answer\n",
        f"With the load above, one learner {verdict} 1,000 collectors, which take "
        f"{_percent(share.total)} of a core. It is saturated at {_rounded(most)} collectors. "
        f"Heartbeats alone fill a core at {_rounded(1 / cost.idle_s)} collectors.\n",
        f"10,000 collectors would take {_percent(cost.share(10_000, LOAD).total)} of a core; the "
        f"bytes of their batches alone take {_percent(n_bytes * cost.batch.byte_s)}.\n",
        "### The simulated cluster\n",
        _simulated_table(simulated),
        "### Real connections\n",
        _real_table(real),
        "### As fast as they can\n",
        _flood_table(real),
        "### The model with these figures\n",
        _arithmetic(cost),
        _model_table(cost),
        "### Where the learner is saturated\n",
        _saturation_table(cost),
        "### Ten thousand collectors\n",
        _remedies_table(cost),
    ]
    return "\n".join(parts)


def _simulated_table(simulated: Mapping[int, tuple[Formed, Costs]]) -> str:
    head = (
        "collectors",
        "form, simulated s",
        "form, CPU s of all",
        "form, CPU s of the hub",
        "idle, µs a second",
        *(f"batch of {_size(size)}, µs" for size in BATCH_BYTES),
        *(f"weights of {_size(size)}, µs" for size in WEIGHTS_BYTES),
    )
    lines = [
        (
            f"{n:,}",
            f"{formed.simulated_s:.2f}",
            f"{formed.total_cpu_s:.1f}",
            f"{formed.hub_cpu_s:.2f}",
            *_microseconds(costs),
        )
        for n, (formed, costs) in simulated.items()
    ]
    return render_table(head, lines)


def _real_table(real: Mapping[int, Real]) -> str:
    head = (
        "connections",
        "where",
        "idle, µs a second",
        *(f"batch of {_size(size)}, µs" for size in BATCH_BYTES),
        *(f"weights of {_size(size)}, µs" for size in WEIGHTS_BYTES),
    )
    lines = [
        (f"{n:,}", where, *_microseconds(costs))
        for n, one in real.items()
        for where, costs in (("router and task", one.router), ("the system", one.below))
    ]
    return render_table(head, lines)


def _flood_table(real: Mapping[int, Real]) -> str:
    lines = [
        (
            f"{n:,}",
            _size(size),
            _rounded(one.flood[size]),
            f"{one.flood_s[size] * _MILLION:.0f}",
            _percent(one.flood[size] * one.flood_s[size]),
        )
        for n, one in real.items()
        for size in BATCH_BYTES
    ]
    head = ("connections", "batch", "batches a second", "CPU of each, µs", "share of a core")
    return render_table(head, lines)


def _arithmetic(cost: HubCost) -> str:
    return (
        "```text\n"
        f"idle = {cost.idle_s * _MILLION:.0f} µs for each collector and second\n"
        f"a    = {cost.batch.fixed_s * _MILLION:.0f} µs, "
        f"b = {cost.batch.byte_s * 1e9:.2f} ns: a batch takes a + b · bytes\n"
        f"c    = {cost.weights.fixed_s * _MILLION:.0f} µs, "
        f"d = {cost.weights.byte_s * 1e9:.2f} ns: weights take c + d · bytes for each collector\n"
        "\n"
        "share of a core = n · (idle + batches · (a + b · batch bytes)\n"
        "                       + (c + d · weights bytes) / seconds between weights)\n"
        f"1,000 collectors  = 1,000 · ({cost.idle_s * _MILLION:.0f} µs "
        f"+ {LOAD.batches:g} · {cost.batch.at(LOAD.batch_bytes) * _MILLION:.0f} µs "
        f"+ {cost.weights.at(LOAD.weights_bytes) * _MILLION:.0f} µs / {LOAD.weights_every_s:g}) "
        f"= {_percent(cost.share(1000, LOAD).total)}\n"
        "```\n"
    )


def _model_table(cost: HubCost) -> str:
    lines = []
    for n in (10, 100, 300, 1000, 3000, 10_000):
        share = cost.share(n, LOAD)
        parts = (share.idle, share.batches, share.weights, share.total)
        lines.append((f"{n:,}", *map(_percent, parts)))
    return render_table(("collectors", "idle", "batches", "weights", "share of a core"), lines)


def _saturation_table(cost: HubCost) -> str:
    lines = []
    for kind, steps in (("vectors", 16), ("vectors", 1024), ("images", 64)):
        size = steps * STEP_BYTES[kind]
        load = Load(
            batches=0,
            batch_bytes=size,
            weights_bytes=LOAD.weights_bytes,
            weights_every_s=LOAD.weights_every_s,
        )
        for n in (100, 1000):
            batches = cost.most_batches(n, load)
            lines.append(
                (
                    f"{steps:,} steps, {kind}",
                    _size(size),
                    f"{n:,}",
                    _rounded(batches),
                    _rounded(batches * steps),
                    f"{batches * size / _MILLION:,.0f}",
                )
            )
    head = ("batch", "size", "collectors", "batches a second", "env steps a second", "MB a second")
    return render_table(head, lines)


def _remedies_table(cost: HubCost) -> str:
    def load(factor: float, every_s: float) -> Load:
        return Load(
            batches=1 / every_s,
            batch_bytes=factor * every_s * LOAD.batch_bytes,
            weights_bytes=LOAD.weights_bytes,
            weights_every_s=LOAD.weights_every_s,
        )

    n_relays = -(-10_000 // RELAY_COLLECTORS)
    cases = [
        ("10,000 collectors, a batch each second", 10_000, load(1, 1)),
        ("the same, a batch of ten times the size every 10 s", 10_000, load(1, 10)),
        ("1,000 collectors, each with ten times the environments", 1000, load(10, 1)),
        ("200 collectors, each with fifty times the environments", 200, load(50, 1)),
        (
            f"{n_relays} relays, each for {RELAY_COLLECTORS} collectors",
            n_relays,
            load(10_000 / n_relays, 1),
        ),
    ]
    lines = []
    for name, n, one in cases:
        share = cost.share(n, one)
        parts = (share.idle, share.batches, share.weights, share.total)
        lines.append((name, _size(one.batch_bytes), *map(_percent, parts)))
    head = ("nodes at the learner", "batch", "idle", "batches", "weights", "share of a core")
    return render_table(head, lines)


def _microseconds(costs: Costs) -> Iterator[str]:
    for cost_s in (costs.idle_s, *costs.batch_s.values(), *costs.weights_s.values()):
        yield f"{cost_s * _MILLION:.0f}"


def _percent(share: float) -> str:
    return f"{share:.1%}" if share < 0.1 else f"{share:.0%}"


def _rounded(value: float) -> str:
    """Return a number with two digits that count."""
    digits = 2 - len(f"{abs(value):.0f}")
    return f"{round(value, min(0, digits)):,.0f}"


def _size(n_bytes: float) -> str:
    if n_bytes >= 1e6:
        return f"{n_bytes / 1e6:.2g} MB"
    return f"{n_bytes / 1024:.0f} KB" if n_bytes % 1024 == 0 else f"{n_bytes / 1000:.0f} kB"


def _means(found: Mapping[int, list[float]]) -> dict[int, float]:
    return {size: statistics.fmean(values) for size, values in found.items()}


def _router(number: int, n_peers: int, clock: Clock, transport: Transport) -> Router:
    address: dict[str, Any] = {"dial": [_ADDRESS]} if number else {"listen": _ADDRESS}
    return Router(
        node_id=number,
        key=KEY,
        clock=clock,
        transport=transport,
        expected_peers=n_peers,
        start_timeout_s=FORM_S,
        **address,
    )


@contextmanager
def _without_garbage() -> Iterator[None]:
    """Keep the collector from visiting the objects of all the collectors in the hub's time."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
