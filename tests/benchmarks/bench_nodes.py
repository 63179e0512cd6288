"""Many nodes.

One process is the hub of a star, and a few other processes hold its peers, each with a socket of
its own. Every figure is the CPU time of the hub's process. A small event to all peers is measured
until the last frame is sent, and once more with the acknowledgments that come back, less the share
that the hub uses when it is idle. Weights go over tcp, and a false departure is a peer that counts
as lost while it lives; the machine must have time for the peers' processes too.

A small event to many depends on the machine, so it has no bar. Each peer has its own session, so
an event takes a number, a signature and a system call for each, and each peer acknowledges it with
its next heartbeat. The row of bare sends says what it takes to send as many bytes to as many
sleeping threads.

With the variable ``BENCH_BEFORE`` set to another checkout of the repository, the same program also
measures that one in the same run, and each row is repeated against it. ``BENCH_SMALL=1`` measures
an eighth of the peers.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.benchmarks.report import Row

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = Path(__file__).with_name("nodes_program.py")
N_PROCESSES = 4
MB = 1 << 20

_SMALL = bool(os.environ.get("BENCH_SMALL"))
N_IDLE = 64 if _SMALL else 512
N_BROADCAST = 32 if _SMALL else 256
N_WEIGHTS = 8 if _SMALL else 64
WEIGHTS_BYTES = 20 * MB
IDLE_S = 5.0 if _SMALL else 10.0
ROUNDS = 3
_DEADLINE_S = 300.0
_SETTLE_S = 0.3


@dataclass(frozen=True, slots=True)
class Measured:
    """The figures of one checkout.

    Attributes:
        idle: from a star of idle peers.
        broadcast: from small events to all peers.
        weights: from large events to all peers.
    """

    idle: dict[str, Any]
    broadcast: dict[str, Any]
    weights: dict[str, Any]


def rows() -> list[Row]:
    """Measure an idle star, a broadcast, and weights."""
    before = os.environ.get("BENCH_BEFORE")
    ours, *others = measure([ROOT] if before is None else [ROOT, Path(before)])
    found = [
        bar(f"{N_IDLE} idle peers", ours.idle["share"] * 100, 6, "% of a core"),
        stated(f"a small event to {N_BROADCAST}, sent", ours.broadcast["sent_s"]),
        stated(f"a small event to {N_BROADCAST}, acknowledged", ours.broadcast["total_s"]),
        stated(f"{N_BROADCAST} bare sends over sockets", bare_sends(N_BROADCAST)),
        bar("threads per peer", ours.idle["threads"] / N_IDLE, 1, "threads"),
        bar("descriptors per peer", ours.idle["descriptors"] / N_IDLE, 1, "descriptors"),
        bar(
            f"20 MB to {N_WEIGHTS}: false departures and lost copies",
            ours.weights["left"] + ours.weights["missing"],
            0,
            "",
        ),
    ]
    return found + [row for other in others for row in compared(ours, other)]


def compared(ours: Measured, before: Measured) -> list[Row]:
    """Return rows that compare two checkouts."""
    pairs = [
        ("idle peers", "% of a core", 100, ours.idle["share"], before.idle["share"]),
        ("threads per peer", "", 1 / N_IDLE, ours.idle["threads"], before.idle["threads"]),
        (
            "descriptors per peer",
            "",
            1 / N_IDLE,
            ours.idle["descriptors"],
            before.idle["descriptors"],
        ),
        ("forming", "s of CPU", 1, ours.idle["form_cpu_s"], before.idle["form_cpu_s"]),
        ("sent", "ms of CPU", 1e3, ours.broadcast["sent_s"], before.broadcast["sent_s"]),
        ("acknowledged", "ms of CPU", 1e3, ours.broadcast["total_s"], before.broadcast["total_s"]),
        ("20 MB, each time", "s", 1, ours.weights["round_s"], before.weights["round_s"]),
        ("20 MB, each time", "s of CPU", 1, ours.weights["cpu_s"], before.weights["cpu_s"]),
        ("20 MB, false departures", "", 1, ours.weights["left"], before.weights["left"]),
        ("20 MB, lost copies", "", 1, ours.weights["missing"], before.weights["missing"]),
    ]
    return [
        Row(
            name,
            "the version before",
            ours=factor * one,
            reference=factor * other,
            ratio=one / other if other else None,
            unit=unit,
        )
        for name, unit, factor, one, other in pairs
    ]


def measure(checkouts: Sequence[Path]) -> list[Measured]:
    """Run the program with the code of each checkout, alternating between them."""
    idle = [idle_star(one) for one in checkouts]
    broadcast = [small_events(one) for one in checkouts]
    weights = [large_events(one) for one in checkouts]
    return list(map(Measured, idle, broadcast, weights))


def idle_star(checkout: Path) -> dict[str, Any]:
    """Measure a hub whose peers are idle."""
    with (
        tempfile.TemporaryDirectory(prefix="bench-") as folder,
        star(checkout, f"ipc://{folder}/hub", N_IDLE) as hub,
    ):
        return hub.ask("wait_for", N_IDLE) | hub.ask("idle", IDLE_S)


def small_events(checkout: Path) -> dict[str, Any]:
    """Measure small events to all peers."""
    with (
        tempfile.TemporaryDirectory(prefix="bench-") as folder,
        star(checkout, f"ipc://{folder}/hub", N_BROADCAST) as hub,
    ):
        hub.ask("wait_for", N_BROADCAST)
        return hub.ask("broadcast", 9)


READERS = """
import socket, sys, threading

def read(descriptor):
    with socket.socket(fileno=descriptor) as end:
        while end.recv(4096):
            pass

for descriptor in map(int, sys.argv[1:]):
    threading.Thread(target=read, args=(descriptor,)).start()
print("reading", flush=True)
"""


def bare_sends(n_sockets: int, rounds: int = 9) -> float:
    """Return the CPU seconds of sending 200 bytes to many sockets, each with a thread that waits.

    The threads are in as many processes as the peers of the hub, so each send wakes one, too.
    """
    with contextlib.ExitStack() as stack:
        pairs = [socket.socketpair() for _ in range(n_sockets)]
        for number in range(N_PROCESSES):
            ends = [other.fileno() for _, other in pairs[number::N_PROCESSES]]
            command = [sys.executable, "-c", READERS, *map(str, ends)]
            reader = subprocess.Popen(command, stdout=subprocess.PIPE, pass_fds=ends)
            stack.enter_context(reader)
            assert reader.stdout is not None
            reader.stdout.readline()
        for end, other in pairs:
            other.close()
            # The threads end when their sockets are closed, before their processes are awaited.
            stack.enter_context(end)
        taken = []
        for _ in range(rounds):
            time.sleep(_SETTLE_S)
            started = time.thread_time()
            for end, _other in pairs:
                end.sendmsg([bytes(200)])
            taken.append(time.thread_time() - started)
    return sorted(taken)[rounds // 2]


def large_events(checkout: Path) -> dict[str, Any]:
    """Measure weights to all peers."""
    with star(checkout, f"tcp://127.0.0.1:{free_port()}", N_WEIGHTS) as hub:
        hub.ask("wait_for", N_WEIGHTS)
        return hub.ask("weights", WEIGHTS_BYTES, N_WEIGHTS, ROUNDS)


class RunningHub:
    """The process of the hub."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.address = str(self._read()["address"])

    def ask(self, name: str, *arguments: Any) -> dict[str, Any]:
        """Let it run a method of ``Hub`` and return the result."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([name, *arguments]) + "\n")
        self._process.stdin.flush()
        return self._read()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the hub ended early; its error is printed above")
        return dict(json.loads(line))


@contextlib.contextmanager
def star(
    checkout: Path, address: str, n_peers: int, *, program: Path = PROGRAM
) -> Iterator[RunningHub]:
    """Run a hub and its peers until the block ends.

    Args:
        checkout: the repository whose code runs.
        address: where the hub listens.
        n_peers: the number of peers, which share a few processes.
        program: takes the arguments of nodes_program.py.
    """
    with contextlib.ExitStack() as stack:
        hub = RunningHub(stack.enter_context(_running(checkout, program, "hub", address)))
        share, extra = divmod(n_peers, N_PROCESSES)
        first = 1
        for index in range(min(n_peers, N_PROCESSES)):
            count = share + (index < extra)
            arguments = ("peers", hub.address, str(first), str(count))
            stack.enter_context(_running(checkout, program, *arguments))
            first += count
        yield hub


@contextlib.contextmanager
def _running(checkout: Path, program: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-W", "ignore", str(program), *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=checkout,
        env=os.environ | {"PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"},
    ) as process:
        try:
            yield process
        finally:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
            try:
                process.wait(10.0)
            except subprocess.TimeoutExpired:
                process.kill()


def stated(name: str, cpu_s: float) -> Row:
    """Return a row without a bar."""
    return Row(name, "no bar", ours=cpu_s * 1e3, unit="ms of CPU")


def bar(name: str, ours: float, limit: float, unit: str) -> Row:
    """Return a row whose reference is the largest figure that is allowed."""
    ratio = ours / limit if limit else 1 + ours
    return Row(
        name, "absolute bar", ours=ours, reference=limit, ratio=ratio, unit=unit, at_most=1.0
    )


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
