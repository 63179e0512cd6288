"""Shared memory when one side is killed: which files remain, and when they are removed."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from dmiddleware.errors import TransportError
from dmiddleware.router.transport import Channel
from dmiddleware.router.transport.slabs import sweep
from tests.dmiddleware.router.request_handlers import replying_with
from tests.dmiddleware.router.shared_folders import MAX_BYTES, big, shared, talking

DEADLINE_S = 20.0


PROGRAM = """
    import os, signal, sys
    from pathlib import Path
    from dmiddleware.router.transport.nng import NngTransport
    from dmiddleware.router.transport import shared_memory, slabs
    from tests.dmiddleware.router.endpoints import unlimited

    phase, address, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3])

    def die(*_, **__):
        os.kill(os.getpid(), signal.SIGKILL)

    if phase == "made":  # the file exists, and no other process knows of it
        allocate = os.posix_fallocate
        os.posix_fallocate = lambda *a: (allocate(*a), die())
    elif phase == "filled":  # the ticket has not been sent yet
        fill = slabs.SlabPool.fill
        slabs.SlabPool.fill = lambda *a, **options: (fill(*a, **options), die())

    transport = shared_memory.SharedMemoryTransport(NngTransport(), directory=folder)
    if phase == "taken":  # the listener has the request
        serve = die
    elif phase == "replied":  # the reply is ready
        serve = lambda raw, _, reply: reply(die() if bytes(raw[:1]) == b"d" else bytes(1 << 20))
    if phase in ("taken", "replied", "waiting"):
        if phase == "waiting":
            serve = lambda raw, _, reply: reply(bytes(1 << 20))
        transport.listen(address, serve, on_disconnect=lambda _: None, limits=unlimited(4 << 20))
        print("listening", flush=True)
        sys.stdin.read()
    else:
        channel = transport.dial(
            address, connect_timeout_s=20, reply_timeout_s=20, max_frame_bytes=4 << 20
        )
        answer = channel.request(bytes(1 << 20))
        die()  # the dialer has the reply
"""


def start(phase: str, address: str, folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(PROGRAM), phase, address, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


@pytest.mark.process
@pytest.mark.parametrize("phase", ["made", "filled", "holding"])
def test_a_dialer_killed_at_any_point_leaves_no_files_and_the_listener_continues(
    folder: Path, address: str, phase: str
) -> None:
    held: list[memoryview] = []

    @replying_with
    def serve(raw: memoryview, _: int) -> bytes:
        held.append(raw)
        return bytes(1 << 20)

    with talking(address, shared(folder), shared(folder), serve) as channel:
        with start(phase, address, folder) as dialer:
            assert dialer.wait(DEADLINE_S) == -signal.SIGKILL
        assert big(folder), "it died before it created a slab"
        assert all(view == bytes(1 << 20) for view in held)
        sweep(folder)
        assert {path.name.partition("-")[0] for path in folder.iterdir()} <= {str(os.getpid())}
        assert channel.request(bytes(1 << 20)) == bytes(1 << 20)
        held.clear()
    assert list(folder.iterdir()) == []


@pytest.mark.process
def test_noticing_a_dead_peer_removes_its_slabs(folder: Path, address: str) -> None:
    with talking(
        address, shared(folder), shared(folder), replying_with(lambda *_: bytes(1 << 20))
    ) as channel:
        with start("holding", address, folder) as dialer:
            assert dialer.wait(DEADLINE_S) == -signal.SIGKILL
        deadline = time.monotonic() + DEADLINE_S
        while any(path.name.startswith(f"{dialer.pid}-") for path in folder.iterdir()):
            assert time.monotonic() < deadline, "the slabs of the dead process still exist"
            channel.request(b"?")


@pytest.mark.process
@pytest.mark.parametrize("phase", ["taken", "replied"])
def test_a_listener_killed_at_any_point_leaves_no_files_and_can_be_replaced(
    folder: Path, address: str, phase: str
) -> None:
    transport = shared(folder)

    def dial() -> Channel:
        return transport.dial(
            address, connect_timeout_s=20.0, reply_timeout_s=20.0, max_frame_bytes=MAX_BYTES
        )

    with start(phase, address, folder) as listener:
        assert listener.stdout is not None and listener.stdout.readline()
        with contextlib.closing(dial()) as channel:
            answer = channel.request(b"a") if phase == "replied" else None
            with pytest.raises(TransportError):
                channel.request(b"d" * (1 << 20))
            assert answer is None or answer == bytes(1 << 20)
        assert listener.wait(DEADLINE_S) == -signal.SIGKILL
    with start("waiting", address, folder) as listener:
        assert listener.stdout is not None and listener.stdout.readline()
        with contextlib.closing(dial()) as channel:
            assert channel.request(b"d" * (1 << 20)) == bytes(1 << 20)
        listener.kill()
    sweep(folder)
    assert list(folder.iterdir()) == []
