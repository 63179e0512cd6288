"""The two sides of the router's benchmarks, each with its peer in another process."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import numpy as np
import pynng

from dmiddleware.pipeline import Event
from dmiddleware.router import NodeOptions, Router
from dmiddleware.router.transport.shared_memory import SharedMemory
from tests.accepting import accepting

ROOT = Path(__file__).resolve().parents[2]
WEIGHTS_SIZE = 1_600
"""A linear layer with this many inputs and outputs has 10 MB of weights."""

_DEADLINE_S = 120.0

# As in a program, each event is declared once.
PING, BEGIN, DATA = map(Event, ("ping", "begin", "data"))
WEIGHTS = Event("weights", delivery="latest")


def new_address(folder: Path, name: str, *, tcp: bool) -> str:
    """Return an unused address."""
    if not tcp:
        return f"ipc://{folder}/{name}"
    with socket.create_server(("127.0.0.1", 0)) as free:
        return f"tcp://127.0.0.1:{free.getsockname()[1]}"


@contextlib.contextmanager
def peer(mode: str, *arguments: str) -> Iterator[None]:
    """Run the peer process until the block ends."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.benchmarks.router_peer", mode]
    with subprocess.Popen(
        [*command, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT
    ) as process:
        assert process.stdout is not None and process.stdin is not None
        if process.stdout.readline() != b"ready\n":
            raise RuntimeError(f"the peer {mode} did not start")
        try:
            yield
        finally:
            process.stdin.close()
            process.wait(_DEADLINE_S)


class Stream:
    """Reliable events to a router in another process.

    Args:
        folder: for the socket.
        outbox_bytes: how many bytes may be unacknowledged; None: the default.
        batched: whether small events share frames.
        shared: the folder for large frames, in memory; None: they go through the socket.
        tcp: whether it goes over tcp instead of ipc.
    """

    def __init__(
        self,
        folder: Path,
        *,
        outbox_bytes: int | None = None,
        batched: bool = True,
        shared: Path | None = None,
        tcp: bool = False,
    ) -> None:
        address = new_address(folder, f"stream-{id(self)}", tcp=tcp)
        options = NodeOptions(
            **({} if outbox_bytes is None else {"outbox_bytes": outbox_bytes}),
            **({} if batched else {"batch_bytes": 1}),
        )
        self._answers = threading.Semaphore(0)
        with contextlib.ExitStack() as stack:
            mode = "sink" if shared is None else "shared-sink"
            stack.enter_context(peer(mode, address, *([] if shared is None else [str(shared)])))
            memory = None if shared is None else SharedMemory(shared)
            self._router = stack.enter_context(
                Router(node_id=0, dial=[address], options=options, shared_memory=memory)
            )
            self._router.attach(accepting(self._take))
            self._router.subscribe("done", active=True)
            self._router.subscribe("pong", active=True)
            self._router.wait_for_peers(1, timeout_s=30.0, events=["ping"])
            # Once the peer answers, it knows this node's subscriptions.
            self._router.emit(PING, (), {})
            self._await()
            self._stack = stack.pop_all()

    def send(self, n: int, payload: Any) -> None:
        """Emit an event ``n`` times, and wait until the other process has handled them all."""
        router = self._router
        router.emit(BEGIN, (n,), {})
        for _ in range(n):
            router.emit(DATA, (payload,), {})
        self._await()

    def ping(self) -> None:
        """Emit an event and wait for the reply."""
        self._router.emit(PING, (), {})
        self._await()

    def _take(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        if name in ("done", "pong"):
            self._answers.release()
        return True

    def _await(self) -> None:
        if not self._answers.acquire(timeout=_DEADLINE_S):
            raise TimeoutError("the other process did not answer")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stack.close()


class RawStream:
    """The same bytes through Push0 and Pull0, which acknowledge nothing."""

    def __init__(self, folder: Path, *, tcp: bool = False) -> None:
        address = new_address(folder, f"raw-{id(self)}", tcp=tcp)
        done = new_address(folder, f"raw-{id(self)}.done", tcp=tcp)
        with contextlib.ExitStack() as stack:
            stack.enter_context(peer("raw-sink", address, done))
            self._data = stack.enter_context(pynng.Push0(dial=address, block_on_dial=True))
            self._control = stack.enter_context(
                pynng.Pair0(
                    dial=done,
                    block_on_dial=True,
                    recv_timeout=int(1000 * _DEADLINE_S),
                )
            )
            self._stack = stack.pop_all()

    def send(self, n: int, payload: bytes) -> None:
        """Send a message ``n`` times and wait until the other process has received them all."""
        self._control.send(str(n).encode())
        for _ in range(n):
            self._data.send(payload)
        self._control.recv()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stack.close()


class RayActor:
    """Calls of a Ray actor's method, at most four in flight."""

    def __init__(self) -> None:
        import ray

        self._ray = ray
        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")

        @ray.remote
        class Sink:
            def take(self, payload: object) -> None:
                """Do nothing."""

        self._actor = Sink.remote()
        self.send(8, b"")

    def send(self, n: int, payload: Any, *, in_flight: int = 4) -> None:
        """Call the method ``n`` times, and wait until the last call has returned."""
        under_way: list[Any] = []
        for _ in range(n):
            if len(under_way) == in_flight:
                _, under_way = self._ray.wait(under_way, num_returns=1)
            under_way.append(self._actor.take.remote(payload))
        self._ray.get(under_way)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._ray.shutdown()


class Weights:
    """Weights of 10 MB, published to three processes that load them."""

    N_READERS = 3

    def __init__(self, folder: Path) -> None:
        import torch

        address = f"ipc://{folder}/weights"
        self._state = torch.nn.Linear(WEIGHTS_SIZE, WEIGHTS_SIZE).state_dict()
        self._applied = threading.Semaphore(0)
        self._version = 0
        with contextlib.ExitStack() as stack:
            self._router = stack.enter_context(Router(node_id=0, listen=address))
            self._router.attach(accepting(self._note_applied, waits=True))
            self._router.subscribe("applied", active=True)
            for number in range(1, self.N_READERS + 1):
                stack.enter_context(peer("reader", address, str(number)))
            self._router.wait_for_peers(self.N_READERS, timeout_s=60.0, events=["weights"])
            self._stack = stack.pop_all()

    def _note_applied(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if name == "applied":
            self._applied.release()

    def publish(self) -> None:
        """Publish a version and wait until all readers have confirmed that they loaded it."""
        self._version += 1
        self._router.emit(WEIGHTS, (self._version, self._state), {})
        for _ in range(self.N_READERS):
            if not self._applied.acquire(timeout=_DEADLINE_S):
                raise TimeoutError("a reader did not confirm the weights in time")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stack.close()


def payload(size: int) -> np.ndarray[Any, Any]:
    """Return an array of ``size`` bytes."""
    return np.random.default_rng(0).integers(0, 255, size, dtype=np.uint8)
