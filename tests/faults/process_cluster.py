"""Start node programs, stop, suspend and kill them, and wait for lines in their ledgers."""

from __future__ import annotations

import contextlib
import math
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import msgspec
import psutil

from dmiddleware.closing import Closing
from tests.faults.ledger import Ledger
from tests.faults.node_program import NodeSpec

__all__ = ["KEY", "Cluster", "Process", "address_for", "alive", "cluster", "wait_until"]

KEY = bytes(range(32)).hex()
ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 30.0
_POLL_S = 0.01
_PORTS = (10_000, 30_000)
_given: set[int] = set()


def wait_until(found: Callable[[], bool], what: str, *, deadline_s: float = DEADLINE_S) -> float:
    """Poll until ``found`` holds, and return the seconds that it took.

    Raises:
        TimeoutError: if it does not hold by the deadline; the message contains ``what``.
    """
    started_at = time.monotonic()
    while not found():
        if time.monotonic() - started_at > deadline_s:
            raise TimeoutError(f"waited {deadline_s:g} s for {what}")
        time.sleep(_POLL_S)
    return time.monotonic() - started_at


def alive(pid: int) -> bool:
    """Return whether a process runs; one that has ended may still be in the system's table."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def address_for(transport: str, folder: Path, name: str = "node") -> str:
    """Return an unused address, which others can dial before its node listens."""
    if transport == "ipc":
        return f"ipc://{folder}/{name}.sock"
    # Not from the range of outgoing connections, where a dialer could connect to itself.
    while True:
        port = random.randrange(*_PORTS)
        if port in _given:
            continue
        _given.add(port)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return f"tcp://127.0.0.1:{port}"


class Process:
    """One start of a node.

    Args:
        spec: the node's settings.
        prefix: a command to run it with, such as ``ip netns exec name``.

    Attributes:
        dead_at: when it was found dead after :meth:`kill`; infinite before.
    """

    def __init__(self, spec: NodeSpec, *, prefix: Sequence[str] = ()) -> None:
        self.spec = spec
        self.ledger = Ledger(Path(spec.ledger))
        self.started_at = time.monotonic()
        self.dead_at = math.inf
        command = [sys.executable, "-m", "tests.faults.node_program"]
        self._stderr = Path(spec.ledger).with_suffix(".err").open("ab")
        self._process = subprocess.Popen(
            [*prefix, *command, msgspec.json.encode(asdict(spec)).decode()],
            stdin=subprocess.PIPE,
            stdout=self._stderr,
            stderr=self._stderr,
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        )

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether it runs."""
        return self._process.poll() is None

    @property
    def view(self) -> psutil.Process:
        """The process as psutil sees it."""
        return psutil.Process(self.pid)

    def send_command(self, command: str) -> None:
        """Write a command to its standard input, unless it has ended."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(command.encode() + b"\n")
            self._process.stdin.flush()

    def await_line(
        self, what: str, *, since: float = 0.0, deadline_s: float = DEADLINE_S, count: int = 1
    ) -> list[Any]:
        """Wait until the ledger has ``count`` lines of this kind, and return the last of them."""
        wait_until(
            lambda: len(self.ledger.lines(what, since=since)) >= count or not self.alive,
            f"{count} lines {what!r} of node {self.spec.node_id}",
            deadline_s=deadline_s,
        )
        lines = self.ledger.lines(what, since=since)
        if len(lines) < count:
            raise RuntimeError(f"node {self.spec.node_id} ended without {what!r}: {self.errors()}")
        return lines[count - 1]

    def status(self) -> dict[str, Any]:
        """Ask for its status."""
        since = time.monotonic()
        self.send_command("status")
        status: dict[str, Any] = self.await_line("status", since=since)[2]
        return status

    def signal(self, number: signal.Signals) -> float:
        """Send a signal, and return the time just before."""
        at = time.monotonic()
        self._process.send_signal(number)
        return at

    def kill(self) -> float:
        """Kill it, and return when the signal was sent."""
        at = self.signal(signal.SIGKILL)
        self._process.wait(DEADLINE_S)
        # The system may need a millisecond to stop all of its threads.
        self.dead_at = time.monotonic()
        return at

    def stop(self) -> None:
        """Ask it to stop; if it hangs, kill it and raise.

        Raises:
            TimeoutError: if it had to be killed.
        """
        self.send_command("stop")
        try:
            self._process.wait(DEADLINE_S)
        except subprocess.TimeoutExpired:
            self.close()
            raise TimeoutError(
                f"node {self.spec.node_id} did not stop within {DEADLINE_S:g} s"
            ) from None

    def errors(self) -> str:
        """Return the end of its standard error."""
        return Path(self._stderr.name).read_text()[-2000:]

    def close(self) -> None:
        """Kill it if it still runs."""
        if self.alive:
            self._process.kill()
            self._process.wait(DEADLINE_S)
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._stderr.close()


class Cluster(Closing):
    """The nodes of one test, which are killed at its end.

    Args:
        transport: ``ipc`` or ``tcp``.
        folder: folder for ledgers and sockets.
    """

    def __init__(self, transport: str, folder: Path) -> None:
        self.transport = transport
        self.folder = folder
        self.address = address_for(transport, folder)
        self.processes: list[Process] = []
        self._names = 0

    def close(self) -> None:
        """End all processes."""
        for process in self.processes:
            process.close()

    def spec(self, node_id: int, **settings: Any) -> NodeSpec:
        """Return the spec of a node with a new ledger, and with the run's key by default."""
        self._names += 1
        ledger = str(self.folder / f"{node_id}-{self._names}.ledger")
        return NodeSpec(node_id=node_id, ledger=ledger, **{"key": KEY, **settings})

    def listener(self, node_id: int = 0, *, prefix: Sequence[str] = (), **settings: Any) -> Process:
        """Start a node that listens on the cluster's address."""
        return self.start(self.spec(node_id, listen=self.address, **settings), prefix=prefix)

    def dialer(self, node_id: int, *, prefix: Sequence[str] = (), **settings: Any) -> Process:
        """Start a node that dials the cluster's address."""
        return self.start(self.spec(node_id, dial=(self.address,), **settings), prefix=prefix)

    def restart(self, process: Process) -> Process:
        """Restart a node, with a new ledger."""
        self._names += 1
        ledger = str(self.folder / f"{process.spec.node_id}-{self._names}.ledger")
        return self.start(replace(process.spec, ledger=ledger))

    def start(self, spec: NodeSpec, *, prefix: Sequence[str] = ()) -> Process:
        """Start a node."""
        process = Process(spec, prefix=prefix)
        self.processes.append(process)
        return process


@contextlib.contextmanager
def cluster(transport: str) -> Iterator[Cluster]:
    """Create a cluster in a new folder, whose name is short enough for a socket."""
    with (
        tempfile.TemporaryDirectory(prefix="faults-") as folder,
        Cluster(transport, Path(folder)) as nodes,
    ):
        yield nodes
