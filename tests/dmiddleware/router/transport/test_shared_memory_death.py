"""Shared memory when one side is killed: which files remain, and when they are removed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from dmiddleware.router.transport.shared_memory import SharedMemory
from tests.dmiddleware.router.shared_folders import (
    DEADLINE_S,
    Node,
    array_of,
    is_in_a_file_of,
    two_nodes,
)
from tests.waiting import wait_until

MB = 1 << 20

# Node 2 dies in a certain phase of a transfer, as its sender or its receiver.
PROGRAM = """
    import os, signal, sys
    from pathlib import Path
    from dmiddleware.router.transport import slabs
    from dmiddleware.router.transport.shared_memory import SharedMemory
    from tests.dmiddleware.router.shared_folders import Node, array_of
    from tests.waiting import wait_until

    phase, address, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3])

    def die(*_, **__):
        os.kill(os.getpid(), signal.SIGKILL)

    def die_after(owner, name):
        function = getattr(owner, name)
        setattr(owner, name, lambda *args, **more: (function(*args, **more), die()))

    if phase == "made":  # the file exists, and no other process knows of it
        die_after(os, "posix_fallocate")
    elif phase == "staged":  # the arrays are in memory, and no frame is
        die_after(slabs.SlabPool, "stage_arrays")
    elif phase == "completed":  # the ticket has not been sent yet
        die_after(slabs.SlabPool, "complete")
    elif phase == "taken":  # the frame has not been processed yet
        die_after(slabs.SlabReader, "take")

    sends = phase in ("made", "staged", "completed", "sent")
    node = Node(
        SharedMemory(folder),
        node_id=2,
        **({"dial": [address]} if sends else {"listen": address}),
    )
    if phase == "handling":
        node.arrays = type("", (), {"append": die, "__len__": lambda self: 0})()
    with node.router as router:
        if sends:
            router.wait_for_peers(1, timeout_s=20, events=("big",))
            wait_until(lambda: node.shares_with(0), "the nodes to agree to share memory")
            node.emit(array_of(1 << 20, 5))
            die()
        print("listening", flush=True)
        assert (node.received(1)[0] == 6).all()
        print("got it", flush=True)
        sys.stdin.read()
"""


def start(phase: str, address: str, folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(PROGRAM), phase, address, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def files_of(process: subprocess.Popen[str], folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if path.name.startswith(f"{process.pid}-")]


@pytest.mark.process
@pytest.mark.parametrize("phase", ["made", "staged", "completed", "sent"])
def test_a_sender_killed_at_any_point_leaves_no_files_and_the_others_continue(
    folder: Path, address: str, phase: str
) -> None:
    with two_nodes(address, SharedMemory(folder), SharedMemory(folder)) as (one, other):
        with start(phase, address, folder) as sender:
            assert sender.wait(DEADLINE_S) == -signal.SIGKILL
        wait_until(lambda: one.left == [2], "the sender's end")
        wait_until(lambda: not files_of(sender, folder), "the sender's files to be removed")
        assert len(one.arrays) <= (phase == "sent")
        assert all((array == 5).all() for array in one.arrays)
        one.arrays.clear()
        other.emit(array_of(MB, 7))
        assert (one.received(1)[0] == 7).all() and is_in_a_file_of(folder, one.arrays[0])
    assert list(folder.iterdir()) == []


@pytest.mark.process
@pytest.mark.parametrize("phase", ["taken", "handling"])
def test_a_receiver_killed_at_any_point_leaves_no_files_and_its_successor_gets_the_array(
    folder: Path, address: str, phase: str
) -> None:
    sender = Node(SharedMemory(folder), dial=[address])
    with sender.router as router:
        with start(phase, address, folder) as receiver:
            router.wait_for_peers(1, timeout_s=DEADLINE_S, events=("big",))
            wait_until(lambda: sender.shares_with(2), "the nodes to agree to share memory")
            sender.emit(array_of(MB, 6), acknowledged="handled")
            assert receiver.wait(DEADLINE_S) == -signal.SIGKILL
        wait_until(lambda: sender.left == [2], "the receiver's end")
        assert sum(sender.transport.sent) < MB, "it was not sent through shared memory"
        wait_until(lambda: not files_of(receiver, folder), "the receiver's files to be removed")
        with start("waiting", address, folder) as successor:
            assert successor.stdout is not None
            assert successor.stdout.readline() == "listening\n"
            assert successor.stdout.readline() == "got it\n"
            wait_until(lambda: sender.shares_with(2), "the nodes to agree to share memory")
            successor.kill()
        wait_until(lambda: not files_of(successor, folder), "the files to be removed")
    assert list(folder.iterdir()) == []


@pytest.mark.process
def test_a_process_sweeps_what_earlier_ones_have_left(folder: Path, address: str) -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait(DEADLINE_S)
    (folder / f"{dead.pid}-{'a' * 16}.slab").write_bytes(b"left behind")
    with two_nodes(address, SharedMemory(folder), SharedMemory(folder)):
        assert {path.name.partition("-")[0] for path in folder.iterdir()} == {str(os.getpid())}
