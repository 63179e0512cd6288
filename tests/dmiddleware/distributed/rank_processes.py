"""Start the ranks of a process group over gloo, each in a process of its own."""

from __future__ import annotations

import multiprocessing as mp
import os
import queue
import socket
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch's stubs lack it

from dmiddleware.distributed import data_parallel

__all__ = ["DEADLINE_S", "WORLD", "agent_store", "run_ranks", "start_ranks"]

WORLD = 2
DEADLINE_S = 90

# One process imports torch, and the ranks are forks of it.
CONTEXT = mp.get_context("forkserver")
CONTEXT.set_forkserver_preload([__name__])


@contextmanager
def agent_store() -> Iterator[int]:
    """Open a store on loopback, as an agent of torchrun does for its ranks, and give its port."""
    listening = socket.create_server(("127.0.0.1", 0))
    port: int = listening.getsockname()[1]
    store = TCPStore(
        "127.0.0.1", port, None, True, timedelta(seconds=DEADLINE_S), wait_for_workers=False,
        master_listen_fd=listening.detach(), use_libuv=False,
    )  # fmt: skip
    yield port
    del store  # which closes it


def run_rank(
    job: Callable[[int], Any], rank: int, port: int, has_agent: bool, answers: Any, timeout_s: float
):
    os.environ.update(
        TORCHELASTIC_USE_AGENT_STORE=str(has_agent),
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


def start_ranks(
    job: Callable[[int], Any],
    timeout_s: float = DEADLINE_S / 2,
    *,
    agent_port: int | None = None,
):
    """Start all ranks, and return their processes and the queue of their answers.

    Args:
        job: a function of a module, or a partial of one; called with the rank.
        timeout_s: the deadline of the group.
        agent_port: the port of :func:`agent_store`; None: rank 0 opens a store.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1] if agent_port is None else agent_port
    answers = CONTEXT.Queue()
    has_agent = agent_port is not None
    arguments = [(job, rank, port, has_agent, answers, timeout_s) for rank in range(WORLD)]
    processes = [CONTEXT.Process(target=run_rank, args=one, daemon=True) for one in arguments]
    for process in processes:
        process.start()
    return processes, answers


def run_ranks(
    job: Callable[[int], Any], *, agent_port: int | None = None, deadline_s: float = DEADLINE_S
) -> list[Any]:
    """Return what the function returns on every rank; the arguments are those of `start_ranks`."""
    processes, answers = start_ranks(job, deadline_s / 2, agent_port=agent_port)
    try:
        got = sorted((answers.get(timeout=deadline_s) for _ in processes), key=lambda one: one[0])
    except queue.Empty:
        raise AssertionError(f"no answer within {deadline_s} s") from None
    finally:
        for process in processes:
            process.join(timeout=10)
            if process.is_alive():
                process.kill()
    for _, _, error in got:
        assert error is None, error
    return [answer for _, answer, _ in got]
