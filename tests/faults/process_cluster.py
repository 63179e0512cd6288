"""Start node programs, stop, suspend and kill them, and wait for lines in their ledgers."""

from __future__ import annotations

import contextlib
import math
import os
import random
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import psutil

from dmiddleware.process.closing import Closing
from dmiddleware.router import Router
from dmiddleware.router.transport.nng_stream import NngStreamTransport
from dmiddleware.router.transport.tls import TlsFiles
from tests.dmiddleware.router.certificates import Authority
from tests.faults.ledger import Ledger
from tests.faults.node_program import NodeSpec
from tests.faults.raw_peer import RawPeer
from tests.waiting import DEADLINE_S, wait_until
from tests.warm_process import WarmProcess

__all__ = [
    "IN_MEMORY",
    "KEY",
    "ROOT",
    "SHARED_MEMORY",
    "TRANSPORTS",
    "Cluster",
    "Process",
    "Slabs",
    "address_for",
    "alive",
    "cluster",
]

KEY = bytes(range(32))
SHARED_MEMORY = "shared memory"
TRANSPORTS = ("ipc", "tcp", "tls+tcp", SHARED_MEMORY)
"""The ways to connect nodes; nodes with shared memory also have an ipc connection."""

IN_MEMORY = "/dev/shm"
ROOT = Path(__file__).resolve().parents[2]
_PORTS = (10_000, 30_000)
_given: set[int] = set()


def alive(pid: int) -> bool:
    """Return whether a process runs; one that has ended may still be in the system's table."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def address_for(transport: str, folder: Path, name: str = "node") -> str:
    """Return an unused address, which others can dial before its node listens."""
    if transport in ("ipc", SHARED_MEMORY):
        return f"ipc://{folder}/{name}.sock"
    # Not from the range of outgoing connections, where a dialer could connect to itself.
    while True:
        port = random.randrange(*_PORTS)
        if port in _given:
            continue
        _given.add(port)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return f"{transport}://127.0.0.1:{port}"


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
        self._process = WarmProcess(
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


class Slabs(Closing):
    """Watches the files of shared memory.

    Args:
        folder: their folder.
        size: bytes of the smallest file that counts.

    Attributes:
        names: the names of all files so far.
        most_bytes: the largest size of all files together.
    """

    def __init__(self, folder: Path, size: int = 1 << 16) -> None:
        self.folder = folder
        self.names: set[str] = set()
        self.most_bytes = 0
        self._size = size
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="slabs", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop watching."""
        self._done.set()
        self._thread.join(5.0)

    def _watch(self) -> None:
        while not self._done.wait(0.02):
            sizes = {}
            for path in self.folder.iterdir():
                with contextlib.suppress(FileNotFoundError):
                    sizes[path.name] = path.stat().st_size
            self.names |= {name for name, size in sizes.items() if size >= self._size}
            self.most_bytes = max(self.most_bytes, sum(sizes.values()))


class Cluster(Closing):
    """The nodes of one test, which are killed at its end.

    Args:
        transport: one of :data:`TRANSPORTS`.
        folder: folder for ledgers, sockets and certificates.
        slabs: the folder of shared memory; None: the nodes share none.
    """

    def __init__(self, transport: str, folder: Path, slabs: Slabs | None = None) -> None:
        self.transport = transport
        self.folder = folder
        self.slabs = slabs
        self.tls: TlsFiles | None = None
        self._settings: dict[str, Any] = {"key": KEY.hex()}
        if transport == "tls+tcp":
            self.tls = self._settings["tls"] = Authority(folder, "faults").files("node")
        if slabs is not None:
            self._settings |= {"shared": str(slabs.folder), "shared_from": 1}
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
        return NodeSpec(node_id=node_id, ledger=ledger, **{**self._settings, **settings})

    def listener(self, node_id: int = 0, *, prefix: Sequence[str] = (), **settings: Any) -> Process:
        """Start a node that listens on the cluster's address."""
        return self.start(self.spec(node_id, listen=self.address, **settings), prefix=prefix)

    def dialer(self, node_id: int, *, prefix: Sequence[str] = (), **settings: Any) -> Process:
        """Start a node that dials the cluster's address."""
        return self.start(self.spec(node_id, dial=(self.address,), **settings), prefix=prefix)

    def router(self, node_id: int, **settings: Any) -> Router:
        """Return a node in this process, with the run's key by default."""
        transport = NngStreamTransport(tls=self.tls)
        return Router(node_id=node_id, **{"key": KEY, "transport": transport, **settings})

    def raw_peer(self, *, secured: bool = True, timeout_s: float = 2.0) -> RawPeer:
        """Connect to the listener by hand.

        Args:
            secured: whether to use TLS where the listener does.
            timeout_s: timeout of each call.
        """
        context = self._tls_context if secured else None
        return RawPeer(self.address, tls=context, timeout_s=timeout_s)

    @cached_property
    def _tls_context(self) -> ssl.SSLContext | None:
        return self.tls.context(listens=False) if self.tls is not None else None

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
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="faults-"))
        slabs = None
        if transport == SHARED_MEMORY:
            memory = tempfile.TemporaryDirectory(prefix="faults-", dir=IN_MEMORY)
            slabs = stack.enter_context(Slabs(Path(stack.enter_context(memory))))
        yield stack.enter_context(Cluster(transport, Path(folder), slabs))
        if slabs is not None and not slabs.names:
            raise RuntimeError("no frame went through shared memory")
