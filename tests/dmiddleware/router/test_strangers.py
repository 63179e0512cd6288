"""What connections without a key may cost a router, in a process with few descriptors."""

from __future__ import annotations

import contextlib
import random
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from dmiddleware.router import Router
from tests.dmiddleware.router.limited_listener_program import KEY, MAX_DESCRIPTORS
from tests.dmiddleware.router.process_resources import is_hung_up_on
from tests.waiting import wait_until

pytestmark = pytest.mark.process

DEADLINE_S = 20.0
HEAD = struct.Struct("<4sIQ")


@dataclass
class Costs:
    """What the listening process costs."""

    resident_kb: int
    cpu_ms: int
    n_descriptors: int
    n_threads: int
    n_peers: int


class Listening:
    """A router in another process."""

    def __init__(self, address: str) -> None:
        program = "tests.dmiddleware.router.limited_listener_program"
        self.process = subprocess.Popen(
            [sys.executable, "-m", program, address],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self.address = self.process.stdout.readline().strip()

    def costs(self) -> Costs:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write("?\n")
        self.process.stdin.flush()
        return Costs(*map(int, self.process.stdout.readline().split()))

    def connect(self) -> socket.socket:
        if self.address.startswith("ipc://"):
            made = socket.socket(socket.AF_UNIX)
            made.settimeout(DEADLINE_S)
            wait_until(lambda: self._connects(made), "room in the system's queue")
            return made
        host, _, port = self.address.removeprefix("tcp://").rpartition(":")
        return socket.create_connection((host, int(port)), DEADLINE_S)

    def _connects(self, made: socket.socket) -> bool:
        # The system's queue may be full for a moment.
        with contextlib.suppress(BlockingIOError):
            made.connect(self.address.removeprefix("ipc://"))
            return True
        return False

    def check_peer_joins(self, *, within_s: float) -> None:
        started_at = time.monotonic()
        with Router(node_id=1, dial=[self.address], key=KEY) as peer:
            peer.wait_for_peers(1, timeout_s=within_s)
        assert time.monotonic() - started_at < within_s + 2.0


@pytest.fixture(params=["ipc", "tcp"])
def listening(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Listening]:
    made = Listening(f"ipc://{tmp_path}/s" if request.param == "ipc" else "tcp://127.0.0.1:0")
    with made.process as process:
        try:
            yield made
        finally:
            process.kill()


def test_claims_of_strangers_cost_no_memory(listening: Listening) -> None:
    before = listening.costs()
    claims = [
        HEAD.pack(b"DMWS", 256 << 10, 256 << 20) + bytes(1000),
        HEAD.pack(b"DMWS", 256 << 10, 1 << 33) + bytes(1000),
        HEAD.pack(b"DMWS", 256 << 10, 1 << 63) + bytes(1000),
        HEAD.pack(b"DMWS", 4096, 4096) + bytes(4000),
        HEAD.pack(b"DMWS", 4097, 4096) + bytes(4000),
        b"\xff" * 100_000,
        b"GET / HTTP/1.1\r\n" * 1000,
        random.Random(1).randbytes(10_000),
    ]
    with contextlib.ExitStack() as stack:
        for claim in claims * 2:
            stranger = stack.enter_context(listening.connect())
            with contextlib.suppress(OSError):
                stranger.sendall(claim)
        during = listening.costs()
    assert during.resident_kb - before.resident_kb < 3000
    listening.check_peer_joins(within_s=5.0)


def test_silent_connections_are_few_and_short_and_a_peer_joins(listening: Listening) -> None:
    listening.check_peer_joins(within_s=5.0)
    wait_until(lambda: listening.costs().n_peers == 0, "the peer to leave")
    before = listening.costs()
    with contextlib.ExitStack() as stack:
        silent = [stack.enter_context(listening.connect()) for _ in range(400)]
        listening.check_peer_joins(within_s=5.0)
        during = listening.costs()
        assert during.n_descriptors < MAX_DESCRIPTORS - 20
        assert during.n_threads == before.n_threads
        assert all(map(is_hung_up_on, silent))
        wait_until(
            lambda: listening.costs().n_descriptors <= before.n_descriptors,
            "the strangers' descriptors",
        )


def test_a_peer_that_does_not_read_costs_no_processor_time(listening: Listening) -> None:
    n_descriptors = listening.costs().n_descriptors
    with contextlib.ExitStack() as stack:
        for _ in range(20):
            stranger = stack.enter_context(listening.connect())
            stranger.sendall(b"DMWS")
        wait_until(
            lambda: listening.costs().n_descriptors <= n_descriptors,
            "the strangers' connections to be closed",
        )
        before = listening.costs()
        with pytest.raises(subprocess.TimeoutExpired):
            listening.process.wait(1.0)
        assert listening.costs().cpu_ms - before.cpu_ms < 100
