"""The nng transport: a failing request must not affect other requests."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from dmiddleware.errors import TransportError
from dmiddleware.router.transport.nng import NngChannel, NngListener, NngTransport
from tests.dmiddleware.router.endpoints import unlimited
from tests.dmiddleware.router.request_handlers import replying_with
from tests.variants import mostly_slow

DEADLINE_S = 20.0
ROOT = Path(__file__).resolve().parents[4]


class Service:
    """Echoes a request; closes the connection on ``close``, and raises on ``fail``."""

    def __init__(self) -> None:
        self.asked = threading.Semaphore(0)
        self.gone = threading.Semaphore(0)

    def answer(self, raw: memoryview, connection: int) -> bytes | None:
        said = bytes(raw)
        self.asked.release()
        if said == b"close":
            # The dialer closes first, so there is nothing left to close.
            assert self.gone.acquire(timeout=DEADLINE_S)
            return None
        if said == b"fail":
            raise KeyError("a defect")
        return said


def listen(folder: Path, service: Service) -> NngListener:
    return NngTransport().listen(
        f"ipc://{folder}/node.sock",
        replying_with(service.answer),
        on_disconnect=lambda _: service.gone.release(),
        limits=unlimited(1 << 20),
    )


def dial(listener: NngListener, reply_timeout_s: float = DEADLINE_S) -> NngChannel:
    return NngTransport().dial(
        listener.address,
        connect_timeout_s=DEADLINE_S,
        reply_timeout_s=reply_timeout_s,
        max_frame_bytes=1 << 20,
    )


def request_and_fail(channel: NngChannel, what: bytes) -> None:
    with pytest.raises(TransportError):
        channel.request(what)


def test_closing_connections_that_are_already_broken_ends_no_thread(tmp_path: Path) -> None:
    service = Service()
    listener = listen(tmp_path, service)
    try:
        for _ in range(12):
            channel = dial(listener)
            asking = threading.Thread(target=request_and_fail, args=(channel, b"close"))
            asking.start()
            assert service.asked.acquire(timeout=DEADLINE_S)
            channel.close()
            asking.join(DEADLINE_S)
        channel = dial(listener)
        assert bytes(channel.request(b"echo")) == b"echo"
        channel.close()
    finally:
        listener.close()


def test_a_failing_request_handler_ends_no_thread(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    listener = listen(tmp_path, Service())
    try:
        for _ in range(12):
            channel = dial(listener)
            request_and_fail(channel, b"fail")
            channel.close()
        channel = dial(listener)
        assert bytes(channel.request(b"echo")) == b"echo"
        channel.close()
    finally:
        listener.close()
    assert caplog.text.count("handling its request failed") == 12


def test_a_request_that_no_listener_accepts_does_not_delay_the_close(tmp_path: Path) -> None:
    service = Service()
    listener = listen(tmp_path, service)
    channel = dial(listener, reply_timeout_s=600.0)
    assert bytes(channel.request(b"echo")) == b"echo"
    listener.close()
    for _ in range(8):
        asking = threading.Thread(target=request_and_fail, args=(channel, b"echo"), daemon=True)
        asking.start()
    closing = threading.Thread(target=channel.close)
    closing.start()
    closing.join(DEADLINE_S)
    assert not closing.is_alive()
    asking.join(DEADLINE_S)


def test_a_broken_channel_is_not_restored(tmp_path: Path) -> None:
    service = Service()
    listener = listen(tmp_path, service)
    with contextlib.closing(dial(listener)) as channel:
        listener.close()
        with contextlib.closing(listen(tmp_path, service)) as back:
            request_and_fail(channel, b"echo")
            with contextlib.closing(dial(back)) as another:
                assert bytes(another.request(b"echo")) == b"echo"
            request_and_fail(channel, b"echo")


@contextlib.contextmanager
def busy_machine() -> Iterator[None]:
    """Keep every processor busy, so that threads are interrupted anywhere."""
    with contextlib.ExitStack() as stack:
        for _ in range(os.cpu_count() or 1):
            other = subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"])
            stack.callback(other.wait, DEADLINE_S)
            stack.callback(other.kill)
        yield


@pytest.mark.process
@pytest.mark.parametrize("kind", mostly_slow(["ipc", "tcp"], keep=1))
def test_a_channel_can_be_closed_after_all_its_requests_got_replies(
    kind: str, tmp_path: Path
) -> None:
    address = f"ipc://{tmp_path}/node.sock" if kind == "ipc" else "tcp://127.0.0.1:0"
    program = "tests.dmiddleware.router.nng_closing_program"
    with busy_machine():
        subprocess.run([sys.executable, "-m", program, address], cwd=ROOT, timeout=90, check=True)
