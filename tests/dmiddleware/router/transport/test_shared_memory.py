"""Large frames through shared memory: when it is used, by which processes, and what remains."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dmiddleware.errors import FrameError, TransportError
from dmiddleware.router.transport.shared_memory import SharedMemory, SlabSharing
from dmiddleware.router.wire.frame import Frame, FrameType, encode_frame
from dmiddleware.router.wire.stream_frames import FrameWriter
from tests.dmiddleware.router.shared_folders import (
    DEADLINE_S,
    Node,
    array_of,
    big,
    is_in_a_file_of,
    two_nodes,
)
from tests.router_state import break_connection, locked_node, n_refused
from tests.waiting import wait_until

LARGE = 512 << 10
MB = 1 << 20


@contextlib.contextmanager
def linked(folder: Path, **options: int) -> Iterator[tuple[SlabSharing, SlabSharing]]:
    """Yield the two ends of a connection whose nodes share a folder."""
    with (
        contextlib.closing(SharedMemory(folder, **options)) as one,
        contextlib.closing(SharedMemory(folder, **options)) as other,
    ):
        here, there = one.sharing(), other.sharing()
        here.agree(there.proof())
        there.agree(here.proof())
        assert here.is_agreed and there.is_agreed
        yield here, there


def arrived(sent: object) -> memoryview:
    return memoryview(bytearray(bytes(sent)))  # type: ignore[call-overload]


def test_only_large_frames_are_replaced_by_tickets(folder: Path) -> None:
    with linked(folder) as (here, there):
        for size in (0, 1, LARGE - 1, LARGE, LARGE + 1, 3 * MB):
            content = np.random.default_rng(size).bytes(size)
            sent = here.put(content)
            assert sent is content if size < LARGE else len(sent) < 200
            assert there.take(arrived(sent)) == content


def test_nothing_is_replaced_before_both_have_agreed(folder: Path) -> None:
    with contextlib.closing(SharedMemory(folder)) as memory:
        sharing, content = memory.sharing(), bytes(LARGE)
        assert sharing.put(content) is content
        for proof in (b"", bytes(60)):
            sharing.agree(proof)
        assert not sharing.is_agreed and sharing.put(content) is content
        assert not big(folder)


def test_a_ticket_without_an_agreement_is_an_error(folder: Path) -> None:
    with linked(folder) as (here, _), contextlib.closing(SharedMemory(folder)) as memory:
        ticket = arrived(here.put(bytes(LARGE)))
        with pytest.raises(FrameError, match="no memory is shared"):
            memory.sharing().take(ticket)


def test_a_ticket_whose_slab_is_gone_breaks_the_connection(folder: Path) -> None:
    with linked(folder) as (here, there):
        ticket = arrived(here.put(bytes(LARGE)))
        for path in big(folder):
            path.unlink()
        for damaged in (ticket, ticket[:20], arrived(b"DMWT")):
            with pytest.raises(TransportError, match="from shared memory; reconnecting"):
                there.take(damaged)


def test_a_link_that_has_ended_leaves_no_slabs(folder: Path) -> None:
    with linked(folder) as (here, there):
        there.take(arrived(here.put(bytes(LARGE))))
        here.put(bytes(LARGE))
        assert big(folder)
        here.close()
        here.close()
        assert not big(folder)
        # A thread may be sending at this moment.
        here.put(bytes(LARGE))
        assert not big(folder)


def test_closing_leaves_nothing_and_creates_nothing_more(folder: Path) -> None:
    with linked(folder) as (here, there):
        held = there.take(arrived(here.put(b"x" * LARGE)))
    assert list(folder.iterdir()) == []
    assert held == b"x" * LARGE
    content = bytes(LARGE)
    assert here.put(content) is content
    assert list(folder.iterdir()) == []


def test_a_full_pool_sends_the_frame_itself(folder: Path) -> None:
    with linked(folder, max_bytes=MB) as (here, there):
        content = bytes(2 * MB)
        assert here.put(content) is content
        assert there.take(arrived(here.put(bytes(LARGE)))) == bytes(LARGE)


def test_folders_that_others_can_enter_are_refused(folder: Path, tmp_path: Path) -> None:
    folder.chmod(0o755)
    with pytest.raises(TransportError, match=r"mode 0700, but has mode 0755"):
        SharedMemory(folder)
    with pytest.raises(TransportError, match="No such file"):
        SharedMemory(tmp_path / "nowhere")


def test_no_proof_opens_files_outside_the_folder_or_keeps_descriptors(
    folder: Path, tmp_path: Path
) -> None:
    secret = b"s" * 16
    (tmp_path / "secret").write_bytes(secret)
    (folder / "plain").write_bytes(secret)
    like_slabs = [f"{number}-{'0' * 16}.slab" for number in range(1, 5)]
    (folder / like_slabs[0]).symlink_to(tmp_path / "secret")
    os.mkfifo(folder / like_slabs[1])
    (folder / like_slabs[2]).mkdir()
    names = [b"../secret", b"plain", b"", b".", b"..", b"a\0b", b"x" * 5000]
    names += [name.encode() for name in like_slabs]
    with contextlib.closing(SharedMemory(folder)) as memory:
        n_before = n_descriptors()
        for _ in range(50):
            assert not any(memory.finds(secret + name) for name in names)
        assert n_descriptors() == n_before
        (folder / like_slabs[3]).write_bytes(secret)
        assert memory.finds(secret + like_slabs[3].encode())
        assert not memory.finds(b"S" + secret[1:] + like_slabs[3].encode())


def test_a_process_creates_its_proof_for_its_first_session(folder: Path, address: str) -> None:
    with Node(SharedMemory(folder), listen=address).router as router:
        assert list(folder.iterdir()) == []
        with Node(None, node_id=1, dial=[router.address]).router:
            router.wait_for_peers(1, timeout_s=DEADLINE_S)
            wait_until(lambda: len(list(folder.iterdir())) == 1, "one slab")
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("protocol", ["ipc", "tcp"])
def test_arrays_travel_between_routers_through_shared_memory(
    folder: Path, address: str, protocol: str
) -> None:
    listen = address if protocol == "ipc" else "tcp://127.0.0.1:0"
    with two_nodes(listen, SharedMemory(folder), SharedMemory(folder)) as nodes:
        for number in range(10):
            for node in nodes:
                node.emit(np.full(300_000, number, np.float32))
        for node in nodes:
            got = node.received(10)
            assert [float(array[0]) for array in got] == [float(number) for number in range(10)]
            assert all((array == array[0]).all() for array in got)
            assert all(is_in_a_file_of(folder, array) for array in got)
            assert max(node.transport.sent) < 10_000, "an array was sent"
    assert list(folder.iterdir()) == []
    assert [float(array[-1]) for array in got] == [float(number) for number in range(10)]


def test_fragments_of_larger_events_travel_through_shared_memory(
    folder: Path, address: str
) -> None:
    with two_nodes(address, SharedMemory(folder), SharedMemory(folder)) as (one, other):
        array = np.random.default_rng(0).integers(0, 256, 40 * MB, dtype=np.uint8)
        one.emit(array)
        np.testing.assert_array_equal(other.received(1)[0], array)
        assert max(one.transport.sent) < 10_000, "a fragment was sent"


def n_in_use(memory: SharedMemory) -> int:
    return sum(not slab.is_free for slab in list(memory._pool._slabs.values()))


def test_an_array_is_copied_once_and_its_memory_is_used_again(folder: Path, address: str) -> None:
    memory = SharedMemory(folder)
    with two_nodes(address, memory, SharedMemory(folder)) as (one, other):
        for number in range(1, 21):
            one.emit(array_of(MB, number))
            (array,) = other.received(1)
            assert is_in_a_file_of(folder, array) and (array == number).all()
            other.arrays.clear()
            del array
            # The newest event may not have been acknowledged or given back yet.
            wait_until(lambda: n_in_use(memory) <= 1, "the slabs to be returned")
        assert len(big(folder)) <= 2


def test_an_event_is_staged_only_for_a_single_peer_that_shares(
    folder: Path, tmp_path: Path, address: str
) -> None:
    other = tmp_path / "other"
    other.mkdir(mode=0o700)
    with two_nodes(address, SharedMemory(folder), SharedMemory(other), agree=False) as (one, two):
        for node, peer in ((one, two), (two, one)):
            node.emit(array_of(MB))
            assert not is_in_a_file_of(tmp_path, peer.received(1)[0])
        assert not one.shares_with(1) and not two.shares_with(0)
        assert not big(folder) and not big(other)


def test_readers_do_not_see_what_another_one_changes_in_place(folder: Path, address: str) -> None:
    with two_nodes(address, SharedMemory(folder), SharedMemory(folder)) as (one, other):
        absent = Node(SharedMemory(folder), node_id=2, dial=[address])
        with absent.router:
            one.router.wait_for_peers(2, timeout_s=DEADLINE_S, events=("big",))
            absent.router.close(goodbye=False)
        for number, delivery in enumerate(("reliable", "latest"), start=1):
            one.emit(array_of(MB, number), delivery=delivery)
            array = other.received(number)[-1]
            assert is_in_a_file_of(folder, array) and (array == number).all()
            array[:] = 99
        returned = Node(SharedMemory(folder), node_id=2, dial=[address])
        with returned.router:
            # The newest one may come again, when the returned node announces its subscriptions.
            wait_until(lambda: {array[0] for array in returned.arrays} == {1, 2}, "both arrays")
            assert [array[0] for array in returned.arrays].count(1) == 1
            assert all((array == array[0]).all() for array in returned.arrays)


def test_a_later_reader_does_not_see_what_the_first_one_has_changed(
    folder: Path, address: str
) -> None:
    with two_nodes(address, SharedMemory(folder), SharedMemory(folder)) as (one, other):
        one.emit(array_of(MB, 3), delivery="latest")
        array = other.received(1)[0]
        assert is_in_a_file_of(folder, array) and (array == 3).all()
        array[:] = 99
        late = Node(SharedMemory(folder), node_id=2, dial=[address])
        with late.router:
            assert (late.received(1)[0] == 3).all()


@pytest.mark.parametrize("shares", [(True, False), (False, True)])
def test_a_peer_without_shared_memory_gets_everything_over_the_connection(
    folder: Path, address: str, shares: tuple[bool, bool]
) -> None:
    memories = [SharedMemory(folder) if one else None for one in shares]
    with two_nodes(address, *memories, agree=False) as (one, other):
        for node, peer in ((one, other), (other, one)):
            node.emit(array_of(MB))
            assert (peer.received(1)[0] == 1).all()
        assert not big(folder)
    assert list(folder.iterdir()) == []


def test_without_free_memory_everything_goes_over_the_connection(
    folder: Path, address: str
) -> None:
    memories = [SharedMemory(folder, max_bytes=MB) for _ in range(2)]
    with two_nodes(address, *memories) as (one, other):
        for number in range(1, 5):
            one.emit(array_of(2 * MB, number))
        for number, array in enumerate(other.received(4), start=1):
            assert (array == number).all() and not is_in_a_file_of(folder, array)


def test_a_frame_whose_slab_cannot_be_opened_is_sent_again_over_the_connection(
    folder: Path, address: str
) -> None:
    with two_nodes(address, SharedMemory(folder), SharedMemory(folder)) as (one, other):

        def remove_slabs() -> None:
            for path in big(folder):
                path.unlink()

        other.transport.on_bytes = remove_slabs
        one.emit(array_of(MB, 7))
        other.received(1)
        one.emit(array_of(MB, 8))
        got = other.received(2)
        assert [int(array[0]) for array in got] == [7, 8]
        assert not any(is_in_a_file_of(folder, array) for array in got)
        # The next connection does not share memory, the one after it does.
        assert not one.shares_with(1) and not other.shares_with(0)
        other.transport.on_bytes = lambda: None
        break_connection(one.router, 1)
        wait_until(
            lambda: one.shares_with(1) and other.shares_with(0), "both to agree to share memory"
        )
        one.emit(array_of(MB, 9))
        assert is_in_a_file_of(folder, other.received(3)[2])
        assert len(other.arrays) == 3 and (other.arrays[2] == 9).all()


def test_memory_is_shared_again_at_once_if_it_has_worked_before(folder: Path, address: str) -> None:
    with two_nodes(address, SharedMemory(folder), SharedMemory(folder)) as (one, other):
        one.emit(array_of(MB, 6))
        assert is_in_a_file_of(folder, other.received(1)[0])

        def remove_once() -> None:
            if removed := big(folder):
                other.transport.on_bytes = lambda: None
                for path in removed:
                    path.unlink()

        # The slab of the first array is still in use, so the next one is in a new file.
        other.transport.on_bytes = remove_once
        one.emit(array_of(MB, 7))
        assert (other.received(2)[1] == 7).all()
        wait_until(lambda: one.left == [1] and other.left == [0], "both to notice the end")
        wait_until(lambda: one.shares_with(1) and other.shares_with(0), "both to agree again")
        one.emit(array_of(MB, 8))
        assert is_in_a_file_of(folder, other.received(3)[2])


def test_a_peer_that_sends_a_ticket_without_an_agreement_is_disconnected(
    folder: Path, address: str
) -> None:
    with two_nodes(address, SharedMemory(folder), None, agree=False) as (one, other):
        with locked_node(other.router) as node:
            connection = node.peers["0"].connection
        assert connection is not None
        connection.route.replace(lambda frame: b"DMWT" + bytes(60))  # type: ignore[attr-defined]
        other.emit(array_of(MB, 3))
        assert (one.received(1)[0] == 3).all(), "the frame is sent again"
        wait_until(lambda: one.left == [1], "the end of the peer")
        assert n_refused(one.router) == 1


def test_a_missing_folder_falls_back_to_the_connection(folder: Path, address: str) -> None:
    with two_nodes(address, SharedMemory(folder), SharedMemory(folder)) as (one, other):
        late = SharedMemory(folder)
        one.emit(array_of(MB))
        other.received(1)
        shutil.rmtree(folder)
        for number in range(2, 5):
            one.emit(array_of(MB, number))
            other.emit(array_of(MB, number))
        assert [int(array[0]) for array in other.received(4)] == [1, 2, 3, 4]
        assert [int(array[0]) for array in one.received(3)] == [2, 3, 4]
        with Node(late, node_id=2, dial=[address]).router as third:
            one.router.wait_for_peers(2, timeout_s=DEADLINE_S, events=("big",))
            assert third.peer_ids() == [0] and not one.shares_with(2)


def test_strangers_read_nothing_and_cost_no_descriptors(
    folder: Path, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with two_nodes(address, SharedMemory(folder), SharedMemory(folder)) as (one, other):
        with contextlib.closing(SharedMemory(folder)) as third:
            proof, ticket = third.proof(), _ticket_for_anyone(third)
            n_before = n_descriptors()
            opened: list[object] = []
            open_file = os.open

            def note_and_open(*args: Any, **options: Any) -> int:
                opened.append(args)
                return open_file(*args, **options)

            monkeypatch.setattr(os, "open", note_and_open)
            for said in (proof, proof[:16] + b"..", b""):
                share = encode_frame(Frame(FrameType.SHARE, metadata=said), max_size=4096)
                for _ in range(50):
                    assert _is_refused(address, share)
            for _ in range(50):
                assert _is_refused(address, ticket)
            assert opened == []
            wait_until(lambda: n_descriptors() <= n_before, "the descriptors to be closed")
        other.emit(array_of(MB))
        assert is_in_a_file_of(folder, one.received(1)[0]), "the peers still share memory"


def _ticket_for_anyone(memory: SharedMemory) -> bytes:
    """Return a ticket that is valid whichever process shows it."""
    sharing = memory.sharing()
    sharing.agree(sharing.proof())
    return bytes(sharing.put(bytes(LARGE)))


def _is_refused(address: str, frame: bytes) -> bool:
    """Send a frame as a stranger, and return whether the connection was closed."""
    writer = FrameWriter()
    writer.put(frame)
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.settimeout(DEADLINE_S)
        stranger.connect(address.removeprefix("ipc://"))
        stranger.sendall(b"".join(writer.next()))
        with contextlib.suppress(ConnectionError):
            while stranger.recv(4096):
                pass
    return True


def n_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))
