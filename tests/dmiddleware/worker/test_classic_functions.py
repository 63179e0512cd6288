"""The small functions that classic workers call."""

import socket
import subprocess
import sys

import pytest

from dmiddleware.worker import EasyTimer, dist_finalize, dist_init, get_task_uid

PROGRAM = """
import sys
import torch
from dmiddleware.worker import dist_finalize, dist_init
rank, size = dist_init("gloo", "127.0.0.1", int(sys.argv[1]), int(sys.argv[2]), 2)
total = torch.tensor([rank + 1.0])
torch.distributed.all_reduce(total)
print(rank, size, total.item())
dist_finalize()
dist_finalize()
assert not torch.distributed.is_initialized()
"""


def test_task_ids_differ():
    assert len({get_task_uid() for _ in range(100)}) == 100


def test_a_timer_measures_each_block():
    timer = EasyTimer(cuda=False)
    assert timer.value == 0.0
    with timer as entered:
        assert timer.value == 0.0
    assert entered is timer
    assert timer.value > 0.0


def test_a_process_without_a_group_is_rank_0_of_1(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert dist_init() == (0, 1)
    dist_finalize()
    dist_finalize()


@pytest.mark.process
@pytest.mark.slow
def test_processes_join_a_group_and_leave_it():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(port), str(rank)],
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    printed = [process.communicate(timeout=100)[0].split() for process in processes]
    assert printed == [["0", "2", "3.0"], ["1", "2", "3.0"]]
