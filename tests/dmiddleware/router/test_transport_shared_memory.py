"""Large bodies through shared memory: where they go, and what is left when a side dies."""

from __future__ import annotations

import contextlib
import gc
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dmiddleware.errors import TransportError
from dmiddleware.pipeline import Event
from dmiddleware.router import Router
from dmiddleware.router.transport import Channel, Listener, Transport
from dmiddleware.router.transport.nng import NngTransport
from dmiddleware.router.transport.shared_memory import SharedMemoryTransport
from dmiddleware.router.transport.slabs import sweep

KEY = bytes(range(32))
MAX_BYTES = 4 << 20
LARGE = 512 << 10
DEADLINE_S = 20.0


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "shared"
    folder.mkdir(mode=0o700)
    return folder


@pytest.fixture
def address(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/0.sock"


class Counting:
    """A transport that counts the bytes that cross it."""

    def __init__(self) -> None:
        self._inner = NngTransport()
        self.asked: list[int] = []
        self.answered: list[int] = []

    def listen(self, address: str, serve: Any, **options: Any) -> Listener:
        def serve_and_count(raw: memoryview, connection: int) -> bytes | bytearray | None:
            answer: bytes | bytearray | None = serve(raw, connection)
            self.answered.append(len(answer or b""))
            return answer

        return self._inner.listen(address, serve_and_count, **options)

    def dial(self, address: str, **options: Any) -> Channel:
        channel = self._inner.dial(address, **options)
        request = channel.request

        def count_and_request(raw: bytes | bytearray) -> memoryview:
            self.asked.append(len(raw))
            return request(raw)

        channel.request = count_and_request  # type: ignore[method-assign]
        return channel

    def covers_body(self, address: str) -> bool:
        return self._inner.covers_body(address)


def shared(folder: Path, inner: Transport | None = None, **options: Any) -> SharedMemoryTransport:
    return SharedMemoryTransport(inner or NngTransport(), directory=folder, **options)


def echo(raw: memoryview, connection: int) -> bytes | bytearray | None:
    return bytes(raw)


@contextlib.contextmanager
def talking(
    address: str,
    listens: Transport,
    dials: Transport,
    serve: Callable[[memoryview, int], bytes | bytearray | None] = echo,
) -> Iterator[Channel]:
    listener = listens.listen(address, serve, on_gone=lambda _: None, max_frame_bytes=MAX_BYTES)
    try:
        channel = dials.dial(address, connect_s=2.0, answer_s=5.0, max_frame_bytes=MAX_BYTES)
        try:
            yield channel
        finally:
            channel.close()
            channel.close()
    finally:
        listener.close()
        listener.close()


def test_large_bodies_are_not_sent_and_small_ones_are(folder: Path, address: str) -> None:
    counting = Counting()
    with talking(address, shared(folder, counting), shared(folder, counting)) as channel:
        counting.asked.clear()
        counting.answered.clear()
        for size in (0, 1, LARGE - 1, LARGE, LARGE + 1, 3 << 20):
            content = np.random.default_rng(size).bytes(size)
            assert channel.request(content) == content
        assert counting.asked[:3] == counting.answered[:3] == [0, 1, LARGE - 1]
        assert max(counting.asked[3:] + counting.answered[3:]) < 200


def test_a_body_is_read_where_it_lies_and_its_memory_is_used_again(
    folder: Path, address: str
) -> None:
    inside: list[bool] = []

    def serve(raw: memoryview, _: int) -> bytes:
        start = np.frombuffer(raw, np.uint8).__array_interface__["data"][0]
        inside.append(_is_in_a_file_of(folder, start))
        return b""

    with talking(address, shared(folder), shared(folder), serve) as channel:
        for _ in range(20):
            channel.request(bytes(1 << 20))
        gc.collect()
        assert len(_big(folder)) <= 3
    assert inside == [True] * 20


def test_an_answer_stays_valid_as_long_as_it_is_held(folder: Path, address: str) -> None:
    def serve(raw: memoryview, _: int) -> bytes:
        return bytes(raw) * (1 << 20)

    with talking(address, shared(folder), shared(folder), serve) as channel:
        held = [channel.request(bytes([number])) for number in range(5)]
        for number, answer in enumerate(held):
            assert answer == bytes([number]) * (1 << 20)
    for number, answer in enumerate(held):
        assert answer[-1] == number, "also after the connection is closed"


def test_closing_leaves_nothing_behind(folder: Path, address: str) -> None:
    with talking(address, shared(folder), shared(folder)) as channel:
        held = channel.request(bytes(LARGE))
        assert _big(folder)
    assert list(folder.iterdir()) == []
    assert held == bytes(LARGE)


def test_nodes_with_different_folders_send_everything(
    folder: Path, tmp_path: Path, address: str
) -> None:
    other = tmp_path / "other"
    other.mkdir(mode=0o700)
    with talking(address, shared(folder), shared(other)) as channel:
        assert channel.request(b"x" * LARGE) == b"x" * LARGE
        assert not _big(folder) and not _big(other)


def test_a_listener_that_knows_nothing_of_this_is_talked_to_as_ever(
    folder: Path, address: str
) -> None:
    def serve(raw: memoryview, _: int) -> bytes | None:
        return bytes(raw) if bytes(raw[:4]) != b"DMWS" else None

    with talking(address, NngTransport(), shared(folder), serve) as channel:
        assert channel.request(b"x" * LARGE) == b"x" * LARGE
    assert list(folder.iterdir()) == []


def test_a_dialer_that_knows_nothing_of_this_is_answered_as_ever(
    folder: Path, address: str
) -> None:
    with talking(address, shared(folder), NngTransport()) as channel:
        assert channel.request(b"x" * LARGE) == b"x" * LARGE


def test_without_room_everything_is_sent(folder: Path, address: str) -> None:
    counting = Counting()
    narrow = shared(folder, counting, max_bytes=1 << 20)
    with talking(address, narrow, narrow) as channel:
        content = b"x" * (2 << 20)
        assert channel.request(content) == content
        assert max(counting.asked) == max(counting.answered) == len(content)


class Vanishing(Counting):
    """A transport during whose work the slabs' files are removed."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder

    def _remove(self) -> None:
        for path in _big(self._folder):
            path.unlink()

    def listen(self, address: str, serve: Any, **options: Any) -> Listener:
        def serve_and_remove(raw: memoryview, connection: int) -> bytes | bytearray | None:
            self._remove()
            answer: bytes | bytearray | None = serve(raw, connection)
            self._remove()
            return answer

        return super().listen(address, serve_and_remove, **options)


def test_a_slab_that_cannot_be_opened_is_sent_after_all(folder: Path, address: str) -> None:
    counting, content = Counting(), b"x" * LARGE
    with talking(
        address, shared(folder, Vanishing(folder)), shared(folder, counting), lambda raw, _: raw[:9]
    ) as channel:
        assert channel.request(content) == content[:9]
    assert counting.asked[-2] < 200 and counting.asked[-1] == len(content)


def test_an_answer_that_cannot_be_opened_breaks_one_connection_and_no_more(
    folder: Path, address: str
) -> None:
    dials = shared(folder)
    options = {"connect_s": 2.0, "answer_s": 5.0, "max_frame_bytes": MAX_BYTES}
    listens = shared(folder, Vanishing(folder)).listen(
        address, lambda raw, _: bytes(LARGE), on_gone=lambda _: None, max_frame_bytes=MAX_BYTES
    )
    with contextlib.closing(listens):
        with (
            contextlib.closing(dials.dial(address, **options)) as channel,
            pytest.raises(TransportError, match="the next connection does without"),
        ):
            channel.request(b"?")
        with contextlib.closing(dials.dial(address, **options)) as channel:
            assert channel.request(b"?") == bytes(LARGE)


def test_a_folder_that_is_gone_is_done_without(folder: Path, address: str) -> None:
    listens, dials, late = (shared(folder) for _ in range(3))
    content = b"x" * LARGE
    with talking(address, listens, dials) as channel:
        assert channel.request(content) == content
        shutil.rmtree(folder)
        for _ in range(3):
            assert channel.request(content) == content
        options = {"connect_s": 2.0, "answer_s": 5.0, "max_frame_bytes": MAX_BYTES}
        with contextlib.closing(late.dial(address, **options)) as another:
            assert another.request(content) == content


def test_folders_that_others_can_enter_are_refused(folder: Path, tmp_path: Path) -> None:
    folder.chmod(0o755)
    with pytest.raises(TransportError, match=r"mode 0700.*it has mode 0755"):
        shared(folder)
    with pytest.raises(TransportError, match="there is no folder"):
        shared(tmp_path / "nowhere")


def test_strangers_cannot_make_a_listener_look_elsewhere(
    folder: Path, tmp_path: Path, address: str
) -> None:
    (tmp_path / "secret").write_bytes(b"s" * 16)
    (folder / "link").symlink_to(tmp_path / "secret")
    os.mkfifo(folder / "pipe")
    hello = b"DMWS\1\0\0\0"
    with talking(address, shared(folder), NngTransport()) as channel:
        for name in (b"../secret", b"link", b"pipe", b"", b".", b"a\0b", b"x" * 5000):
            answer = channel.request(hello + b"s" * 16 + name)
            assert bytes(answer[4:5]) == b"\4", name
        for junk in (b"DMWS", b"DMWS\3\0\0\0", b"DMWS\3\0\0\0" + bytes(60)):
            channel.request(junk)
        assert channel.request(b"x" * LARGE) == b"x" * LARGE


@pytest.mark.parametrize("protocol", ["ipc", "tcp"])
def test_arrays_travel_between_routers_through_shared_memory(
    folder: Path, address: str, protocol: str
) -> None:
    counting = Counting()
    listen = address if protocol == "ipc" else "tcp://127.0.0.1:0"
    got: list[np.ndarray] = []
    came = threading.Semaphore(0)

    def deliver(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if name == "big":
            got.append(args[0])
            came.release()

    with (
        Router(
            listen=listen, key=KEY, transport=shared(folder, counting), expected_peers=1
        ) as learner,
        Router(
            node_id=1,
            dial=[learner.address],
            key=KEY,
            transport=shared(folder, counting),
            expected_peers=1,
        ) as collector,
    ):
        for router in (learner, collector):
            router.attach(deliver)
            router.subscribe("big", active=True)
        begins = [threading.Thread(target=router.begin) for router in (learner, collector)]
        for begin in begins:
            begin.start()
        for begin in begins:
            begin.join(DEADLINE_S)
        for number in range(10):
            for router in (learner, collector):
                router.emit(Event("big"), (np.full(300_000, number, np.float32),), {})
        for _ in range(20):
            assert came.acquire(timeout=DEADLINE_S)
        assert max(counting.asked + counting.answered) < 10_000, "an array was sent"
    assert sorted(float(array[0]) for array in got) == sorted([float(n) for n in range(10)] * 2)
    assert all((array == array[0]).all() for array in got)
    assert list(folder.iterdir()) == []


# Death --------------------------------------------------------------------------------------------

PROGRAM = """
    import os, signal, sys
    from pathlib import Path
    from dmiddleware.router.transport.nng import NngTransport
    from dmiddleware.router.transport import shared_memory, slabs

    phase, address, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3])

    def die(*_, **__):
        os.kill(os.getpid(), signal.SIGKILL)

    if phase == "made":  # the file is there, and nobody knows of it
        real = slabs._create
        slabs._create = lambda *a: (real(*a), die())
    elif phase == "filled":  # the ticket is not on its way yet
        real_put = shared_memory._Room.put
        shared_memory._Room.put = lambda *a: (real_put(*a), die())

    transport = shared_memory.SharedMemoryTransport(NngTransport(), directory=folder)
    if phase == "taken":  # the listener has it in hand
        serve = die
    elif phase == "answered":  # the answer lies ready
        serve = lambda raw, _: (die() if bytes(raw[:1]) == b"d" else bytes(1 << 20))
    if phase in ("taken", "answered", "waiting"):
        if phase == "waiting":
            serve = lambda raw, _: bytes(1 << 20)
        transport.listen(address, serve, on_gone=lambda _: None, max_frame_bytes=4 << 20)
        print("listening", flush=True)
        sys.stdin.read()
    else:
        channel = transport.dial(address, connect_s=5, answer_s=5, max_frame_bytes=4 << 20)
        answer = channel.request(bytes(1 << 20))
        die()  # the dialer has an answer in hand
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
def test_a_dialer_killed_at_any_point_leaves_nothing_and_harms_nobody(
    folder: Path, address: str, phase: str
) -> None:
    held: list[memoryview] = []

    def serve(raw: memoryview, _: int) -> bytes:
        held.append(raw)
        return bytes(1 << 20)

    with talking(address, shared(folder), shared(folder), serve) as channel:
        with start(phase, address, folder) as dialer:
            assert dialer.wait(DEADLINE_S) == -signal.SIGKILL
        assert _big(folder), "it died before it made a slab"
        assert all(view == bytes(1 << 20) for view in held)
        sweep(folder)
        assert {path.name.partition("-")[0] for path in folder.iterdir()} <= {str(os.getpid())}
        assert channel.request(bytes(1 << 20)) == bytes(1 << 20)
        held.clear()
    assert list(folder.iterdir()) == []


@pytest.mark.process
def test_who_notices_that_a_peer_is_dead_sweeps_up_after_it(folder: Path, address: str) -> None:
    with talking(address, shared(folder), shared(folder), lambda *_: bytes(1 << 20)) as channel:
        with start("holding", address, folder) as dialer:
            assert dialer.wait(DEADLINE_S) == -signal.SIGKILL
        deadline = time.monotonic() + DEADLINE_S
        while any(path.name.startswith(f"{dialer.pid}-") for path in folder.iterdir()):
            assert time.monotonic() < deadline, "the dead one's slabs are still there"
            channel.request(b"?")


@pytest.mark.process
@pytest.mark.parametrize("phase", ["taken", "answered"])
def test_a_listener_killed_at_any_point_leaves_nothing_and_is_replaced(
    folder: Path, address: str, phase: str
) -> None:
    transport = shared(folder)

    def dial() -> Channel:
        return transport.dial(address, connect_s=5.0, answer_s=5.0, max_frame_bytes=MAX_BYTES)

    with start(phase, address, folder) as listener:
        assert listener.stdout is not None and listener.stdout.readline()
        with contextlib.closing(dial()) as channel:
            answer = channel.request(b"a") if phase == "answered" else None
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


def _big(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if path.stat().st_size > 1000]


def _is_in_a_file_of(folder: Path, place: int) -> bool:
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, _, end = line.split()[0].partition("-")
        if int(start, 16) <= place < int(end, 16):
            return str(folder) in line
    return False
