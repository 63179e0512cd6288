"""What connections may cost a listener: before they are trusted, and when they do not read."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from dmiddleware.router.transport.framing import FrameReader
from dmiddleware.router.transport.sockets import SocketTransport

from tests.dmiddleware.router.process_resources import HEAD, comes_true, framed

pytestmark = pytest.mark.process

MB = 1 << 20
DEADLINE_S = 20.0


@dataclass
class Costs:
    """What the listening process costs."""

    resident_kb: int
    cpu_ms: int
    n_descriptors: int
    n_threads: int


@dataclass
class Listening:
    """A listener in another process, which has at most 200 descriptors."""

    address: str

    def costs(self) -> Costs:
        """Dial, authenticate, make the process open a file, and return its costs."""
        channel = SocketTransport().dial(
            self.address, connect_timeout_s=DEADLINE_S, reply_timeout_s=5.0, max_frame_bytes=MB
        )
        with contextlib.closing(channel):
            return Costs(*map(int, bytes(channel.request(b"?")).split()))

    def connect(self) -> socket.socket:
        if self.address.startswith("ipc://"):
            made = socket.socket(socket.AF_UNIX)
            made.settimeout(DEADLINE_S)
            made.connect(self.address.removeprefix("ipc://"))
            return made
        host, _, port = self.address.removeprefix("tcp://").rpartition(":")
        return socket.create_connection((host, int(port)), DEADLINE_S)


@pytest.fixture(params=["ipc", "tcp"])
def listening(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Listening]:
    address = f"ipc://{tmp_path}/s" if request.param == "ipc" else "tcp://127.0.0.1:0"
    program = "tests.dmiddleware.router.limited_listener_program"
    with subprocess.Popen(
        [sys.executable, "-m", program, address],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            yield Listening(process.stdout.readline().strip())
        finally:
            process.kill()


def is_closed(made: socket.socket) -> bool:
    made.settimeout(DEADLINE_S)
    try:
        return made.recv(1) == b""
    except ConnectionError:
        return True


def test_claims_of_strangers_cost_no_memory(listening: Listening) -> None:
    before = listening.costs()
    claims = [
        HEAD.pack(b"DMWU", 1, 256 << 10, 1, 256 << 20) + bytes(1000),
        HEAD.pack(b"DMWU", 1, 4096, 1, 4096) + bytes(4000),
        b"\xff" * 100_000,
        b"GET / HTTP/1.1\r\n" * 1000,
    ]
    with contextlib.ExitStack() as stack:
        for claim in claims * 2:
            stranger = stack.enter_context(listening.connect())
            with contextlib.suppress(OSError):
                stranger.sendall(claim)
        during = listening.costs()
    assert during.resident_kb - before.resident_kb < 3000


def test_silent_connections_are_few_and_short(listening: Listening) -> None:
    before = listening.costs()
    with contextlib.ExitStack() as stack:
        started_at = time.monotonic()
        silent = [stack.enter_context(listening.connect()) for _ in range(300)]
        during = listening.costs()
        assert during.n_descriptors < 100
        assert during.n_threads <= before.n_threads + 4
        assert all(map(is_closed, silent))
        assert time.monotonic() - started_at < 10.0
        assert comes_true(lambda: listening.costs().n_descriptors <= before.n_descriptors)


def test_a_process_without_descriptors_still_admits_peers(listening: Listening) -> None:
    """Trusted connections use up the descriptors; dialers are refused until some are closed."""
    with contextlib.ExitStack() as stack:
        trusted = [stack.enter_context(listening.connect()) for _ in range(230)]
        for number, made in enumerate(trusted):
            with contextlib.suppress(OSError):
                made.sendall(framed(1, number, b"?"))
            if number == 100:
                before = listening.costs()
        time.sleep(1.0)
        for made in trusted[:120]:
            made.close()
        after = listening.costs()
        assert after.cpu_ms - before.cpu_ms < 1500, "it spins"


def test_a_connection_that_does_not_read_is_served_no_further(listening: Listening) -> None:
    with listening.connect() as greedy:
        greedy.sendall(b"".join(framed(1, number, b"many") for number in range(1000)))
        greedy.setblocking(False)
        assert comes_true(lambda: listening.costs().resident_kb > 0)
        time.sleep(0.5)
        before = listening.costs()
        time.sleep(1.0)
        after = listening.costs()
    assert after.cpu_ms - before.cpu_ms < 300
    assert after.resident_kb < 150_000


def test_an_urgent_request_overtakes_twenty_megabytes_over_tcp() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"tcp://127.0.0.1:{server.getsockname()[1]}"
        channel = SocketTransport().dial(
            address, connect_timeout_s=5, reply_timeout_s=5, max_frame_bytes=32 * MB
        )
        accepted, _ = server.accept()
        with contextlib.closing(channel), accepted:
            channel.send(bytes(20 * MB), lambda outcome: None, timeout_s=None)
            channel.send(b"urgent", lambda outcome: None, timeout_s=None, urgent=True)
            reader, buffer = FrameReader(1, 32 * MB), memoryview(bytearray(1 << 16))
            order: list[int] = []
            while len(order) < 2:
                reader.add(accepted.recv_into(reader.targets(buffer)[0]), buffer)
                while (item := reader.next()) is not None:
                    order.append(len(item[1]))
                reader.keep()
    assert order == [6, 20 * MB]
