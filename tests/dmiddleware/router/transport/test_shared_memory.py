"""Large bodies through shared memory: when they are used, and what remains of them."""

from __future__ import annotations

import contextlib
import gc
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dmiddleware.errors import TransportError
from dmiddleware.pipeline import Event
from dmiddleware.router import Router
from dmiddleware.router.transport.nng import NngTransport
from dmiddleware.testing import Tape
from tests.dmiddleware.router.endpoints import unlimited
from tests.dmiddleware.router.request_handlers import Parking, replying_with
from tests.dmiddleware.router.shared_folders import (
    MAX_BYTES,
    RecordingTransport,
    SlabRemovingTransport,
    big,
    shared,
    talking,
)

KEY = bytes(range(32))
LARGE = 512 << 10
DEADLINE_S = 20.0


def test_only_small_bodies_are_sent_over_the_socket(folder: Path, address: str) -> None:
    counting = RecordingTransport()
    with talking(address, shared(folder, counting), shared(folder, counting)) as channel:
        counting.asked.clear()
        counting.replied.clear()
        for size in (0, 1, LARGE - 1, LARGE, LARGE + 1, 3 << 20):
            content = np.random.default_rng(size).bytes(size)
            assert channel.request(content) == content
        assert counting.asked[:3] == counting.replied[:3] == [0, 1, LARGE - 1]
        assert max(counting.asked[3:] + counting.replied[3:]) < 200


def test_large_bodies_of_deferred_replies_are_not_sent_over_the_socket(
    folder: Path, address: str
) -> None:
    counting, outcomes, parking = RecordingTransport(), Tape(), Parking()
    with talking(address, shared(folder, counting), shared(folder, counting), parking) as channel:
        counting.asked.clear()
        counting.replied.clear()
        contents = [bytes([number]) * (1 << 20) for number in range(3)]
        for content in contents:
            channel.send(content, lambda answer: outcomes(bytes(answer)), timeout_s=None)
        parked = parking.wait_for(3)
        for content in contents:
            parked[content](content[:-1])
        outcomes.wait_for(3)
        assert sorted(outcomes) == [content[:-1] for content in contents]
        assert max(counting.asked + counting.replied) < 200


def test_a_request_sent_without_waiting_falls_back_to_the_socket(
    folder: Path, address: str
) -> None:
    counting, content, outcomes = RecordingTransport(), b"x" * LARGE, Tape()
    with talking(
        address,
        shared(folder, SlabRemovingTransport(folder)),
        shared(folder, counting),
        replying_with(lambda raw, _: bytes(raw[:9])),
    ) as channel:
        channel.send(content, lambda answer: outcomes(bytes(answer)), timeout_s=None)
        outcomes.wait_for(1)
    assert outcomes == [content[:9]]
    assert counting.asked[-2] < 200 and counting.asked[-1] == len(content)


def test_a_reply_that_cannot_be_opened_fails_the_sent_request(folder: Path, address: str) -> None:
    outcomes = Tape()
    with talking(
        address,
        shared(folder, SlabRemovingTransport(folder)),
        shared(folder),
        replying_with(lambda raw, _: bytes(LARGE)),
    ) as channel:
        channel.send(b"?", lambda answer: outcomes(str(answer)), timeout_s=None)
        outcomes.wait_for(1)
    assert "from shared memory" in next(iter(outcomes))


def test_ignored_replies_leave_no_slabs(folder: Path, address: str) -> None:
    parking, outcomes = Parking(), Tape()
    listens, dials = shared(folder), shared(folder)
    options = {
        "connect_timeout_s": DEADLINE_S,
        "reply_timeout_s": DEADLINE_S,
        "max_frame_bytes": MAX_BYTES,
    }
    with contextlib.closing(
        listens.listen(address, parking, on_disconnect=outcomes, limits=unlimited(MAX_BYTES))
    ) as listener:
        with contextlib.closing(dials.dial(address, **options)) as channel:
            replies = Tape()
            for content in (b"0", b"1", b"2"):
                channel.send(content, replies, timeout_s=None)
            parked = parking.wait_for(3)
            for _ in range(5):
                parked[b"0"](bytes(1 << 20))
            replies.wait_for(1)
            assert len(big(folder)) == 1
        outcomes.wait_for(1)
        parked[b"1"](bytes(1 << 20))
        listener.close()
        parked[b"2"](bytes(1 << 20))
        replies.wait_for(3)
    del replies
    assert list(folder.iterdir()) == []


def test_sending_on_a_closed_channel_leaves_no_slabs(folder: Path, address: str) -> None:
    outcomes = Tape()
    with talking(address, shared(folder), shared(folder)) as channel:
        channel.close()
        channel.send(bytes(LARGE), outcomes, timeout_s=None)
        with pytest.raises(TransportError):
            channel.request(bytes(LARGE))
        outcomes.wait_for(1)
    assert isinstance(next(iter(outcomes)), TransportError)
    assert list(folder.iterdir()) == []


def test_a_body_is_read_in_place_and_its_memory_is_reused(folder: Path, address: str) -> None:
    inside: list[bool] = []

    @replying_with
    def serve(raw: memoryview, _: int) -> bytes:
        start = np.frombuffer(raw, np.uint8).__array_interface__["data"][0]
        inside.append(_is_in_a_file_of(folder, start))
        return b""

    with talking(address, shared(folder), shared(folder), serve) as channel:
        for _ in range(20):
            channel.request(bytes(1 << 20))
        gc.collect()
        assert len(big(folder)) <= 3
    assert inside == [True] * 20


def test_a_reply_stays_valid_while_it_is_referenced(folder: Path, address: str) -> None:
    @replying_with
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
        assert big(folder)
    assert list(folder.iterdir()) == []
    assert held == bytes(LARGE)


def test_nodes_with_different_folders_use_the_socket(
    folder: Path, tmp_path: Path, address: str
) -> None:
    other = tmp_path / "other"
    other.mkdir(mode=0o700)
    with talking(address, shared(folder), shared(other)) as channel:
        assert channel.request(b"x" * LARGE) == b"x" * LARGE
        assert not big(folder) and not big(other)


def test_a_listener_without_shared_memory_gets_requests_over_the_socket(
    folder: Path, address: str
) -> None:
    @replying_with
    def serve(raw: memoryview, _: int) -> bytes | None:
        return bytes(raw) if bytes(raw[:4]) != b"DMWS" else None

    with talking(address, NngTransport(), shared(folder), serve) as channel:
        assert channel.request(b"x" * LARGE) == b"x" * LARGE
    assert list(folder.iterdir()) == []


def test_a_dialer_without_shared_memory_gets_replies_over_the_socket(
    folder: Path, address: str
) -> None:
    with talking(address, shared(folder), NngTransport()) as channel:
        assert channel.request(b"x" * LARGE) == b"x" * LARGE


def test_without_free_memory_everything_is_sent_over_the_socket(folder: Path, address: str) -> None:
    counting = RecordingTransport()
    narrow = shared(folder, counting, max_bytes=1 << 20)
    with talking(address, narrow, narrow) as channel:
        content = b"x" * (2 << 20)
        assert channel.request(content) == content
        assert max(counting.asked) == max(counting.replied) == len(content)


def test_a_request_is_sent_over_the_socket_if_its_slab_cannot_be_opened(
    folder: Path, address: str
) -> None:
    counting, content = RecordingTransport(), b"x" * LARGE
    with talking(
        address,
        shared(folder, SlabRemovingTransport(folder)),
        shared(folder, counting),
        replying_with(lambda raw, _: bytes(raw[:9])),
    ) as channel:
        assert channel.request(content) == content[:9]
    assert counting.asked[-2] < 200 and counting.asked[-1] == len(content)


def test_a_reply_that_cannot_be_opened_breaks_only_its_connection(
    folder: Path, address: str
) -> None:
    dials = shared(folder)
    options = {
        "connect_timeout_s": DEADLINE_S,
        "reply_timeout_s": DEADLINE_S,
        "max_frame_bytes": MAX_BYTES,
    }
    listens = shared(folder, SlabRemovingTransport(folder)).listen(
        address,
        replying_with(lambda raw, _: bytes(LARGE)),
        on_disconnect=lambda _: None,
        limits=unlimited(MAX_BYTES),
    )
    with contextlib.closing(listens):
        with (
            contextlib.closing(dials.dial(address, **options)) as channel,
            pytest.raises(TransportError, match="from shared memory"),
        ):
            channel.request(b"?")
        with contextlib.closing(dials.dial(address, **options)) as channel:
            assert channel.request(b"?") == bytes(LARGE)


def test_a_missing_folder_falls_back_to_the_socket(folder: Path, address: str) -> None:
    listens, dials, late = (shared(folder) for _ in range(3))
    content = b"x" * LARGE
    with talking(address, listens, dials) as channel:
        assert channel.request(content) == content
        shutil.rmtree(folder)
        for _ in range(3):
            assert channel.request(content) == content
        options = {
            "connect_timeout_s": DEADLINE_S,
            "reply_timeout_s": DEADLINE_S,
            "max_frame_bytes": MAX_BYTES,
        }
        with contextlib.closing(late.dial(address, **options)) as another:
            assert another.request(content) == content


def test_folders_that_others_can_enter_are_refused(folder: Path, tmp_path: Path) -> None:
    folder.chmod(0o755)
    with pytest.raises(TransportError, match=r"mode 0700, but has mode 0755"):
        shared(folder)
    with pytest.raises(TransportError, match="No such file"):
        shared(tmp_path / "nowhere")


def test_a_listener_opens_no_files_outside_the_folder(
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
    counting = RecordingTransport()
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
        waits = [
            threading.Thread(target=router.wait_until_ready) for router in (learner, collector)
        ]
        for wait in waits:
            wait.start()
        for wait in waits:
            wait.join(DEADLINE_S)
        for number in range(10):
            for router in (learner, collector):
                router.emit(Event("big"), (np.full(300_000, number, np.float32),), {})
        for _ in range(20):
            assert came.acquire(timeout=DEADLINE_S)
        assert max(counting.asked + counting.replied) < 10_000, "an array was sent"
    assert sorted(float(array[0]) for array in got) == sorted([float(n) for n in range(10)] * 2)
    assert all((array == array[0]).all() for array in got)
    assert list(folder.iterdir()) == []


def _is_in_a_file_of(folder: Path, place: int) -> bool:
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, _, end = line.split()[0].partition("-")
        if int(start, 16) <= place < int(end, 16):
            return str(folder) in line
    return False
