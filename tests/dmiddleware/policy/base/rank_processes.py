"""Start the ranks of a process group over gloo, each in a process of its own."""

from __future__ import annotations

import multiprocessing as mp
import os
import queue
import socket
import traceback
from collections.abc import Callable
from typing import Any

import torch

from dmiddleware.policy import data_parallel

__all__ = ["DEADLINE_S", "WORLD", "run_ranks", "start_ranks"]

WORLD = 2
DEADLINE_S = 90

# One process imports torch, and the ranks are forks of it.
CONTEXT = mp.get_context("forkserver")
CONTEXT.set_forkserver_preload([__name__])


def run_rank(job: Callable[[int], Any], rank: int, port: int, answers: Any, timeout_s: float):
    os.environ.update(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(WORLD),
    )
    torch.set_num_threads(1)
    try:
        with data_parallel(backend="gloo", timeout_s=timeout_s) as own:
            assert own == rank
            answers.put((rank, job(rank), None))
    except BaseException:
        answers.put((rank, None, traceback.format_exc()))
        raise


def start_ranks(job: Callable[[int], Any], timeout_s: float = DEADLINE_S / 2):
    """Start all ranks, and return their processes and the queue of their answers."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    answers = CONTEXT.Queue()
    processes = [
        CONTEXT.Process(target=run_rank, args=(job, rank, port, answers, timeout_s), daemon=True)
        for rank in range(WORLD)
    ]
    for process in processes:
        process.start()
    return processes, answers


def run_ranks(job: Callable[[int], Any]) -> list[Any]:
    """Return what the function returns on every rank.

    Args:
        job: a function of a module, or a partial of one; called with the rank.
    """
    processes, answers = start_ranks(job)
    try:
        got = sorted((answers.get(timeout=DEADLINE_S) for _ in processes), key=lambda one: one[0])
    except queue.Empty:
        raise AssertionError(f"no answer within {DEADLINE_S} s") from None
    finally:
        for process in processes:
            process.join(timeout=10)
            if process.is_alive():
                process.kill()
    for _, _, error in got:
        assert error is None, error
    return [answer for _, answer, _ in got]
