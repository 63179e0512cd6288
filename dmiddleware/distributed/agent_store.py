"""The store of torchrun's agent, which keeps its content when the agent restarts the ranks."""

from __future__ import annotations

import datetime
import os
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch's stubs lack it
from torch.distributed.distributed_c10d import Store

__all__ = ["agree_on_start", "connect", "has_agent_store", "named_run", "next_shared_name"]

_POLL_S: Final = 0.02


@dataclass
class _Run:
    """The run that torchrun has started this process for."""

    name: str = ""
    n_names: int = 0


_RUN: Final = _Run()


def has_agent_store() -> bool:
    """Return whether torchrun has started this process, and has opened the store."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def connect(timeout: datetime.timedelta) -> Store:
    """Return a new connection to the store at ``MASTER_ADDR``.

    Raises:
        RuntimeError: if it cannot be reached.
    """
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return TCPStore(address, port, is_master=False, timeout=timeout)


def agree_on_start(store: Store, rank: int, size: int, timeout: datetime.timedelta) -> str:
    """Return a name that all ranks of this start share, and that no earlier start had.

    The store still has the keys of earlier starts, so keys need such a name.
    ``TORCHELASTIC_RESTART_COUNT`` does not serve: each agent counts only the restarts that its own
    ranks have caused, so it differs between hosts.

    Every rank writes a random greeting. Rank 0 answers each greeting that it has not seen with the
    name, until all ranks of this start have received it. Greetings of earlier starts are answered
    too, but nobody reads those answers.

    Raises:
        RuntimeError: if the ranks do not all come in time.
    """
    token = secrets.token_hex(8)
    if rank:
        store.set(f"start/greeting-{rank}", token)
        store.wait([f"start/answer-{token}"], timeout)
        name = store.get(f"start/answer-{token}").decode()
        store.add(f"start/present-{name}", 1)
        return name
    answered: dict[int, str] = {}
    deadline = time.monotonic() + timeout.total_seconds()
    while (present := store.add(f"start/present-{token}", 0) + 1) < size:
        if time.monotonic() > deadline:
            raise RuntimeError(f"{present} of {size} ranks have come")
        for peer in range(1, size):
            # Reading a key that was never set would wait for it.
            if store.check([f"start/greeting-{peer}"]):
                greeting = store.get(f"start/greeting-{peer}").decode()
                if answered.get(peer) != greeting:
                    store.set(f"start/answer-{greeting}", token)
                    answered[peer] = greeting
        time.sleep(_POLL_S)
    return token


@contextmanager
def named_run(store: Store) -> Iterator[None]:
    """Give the run its name in this block; it is the same after a restart by torchrun."""
    _RUN.name = store.compare_set("run", "", secrets.token_hex(16)).decode()
    try:
        yield
    finally:
        _RUN.name = ""


def next_shared_name() -> str:
    """Return a name for something that a run has one of, such as its folder; empty: none.

    After a restart by torchrun, the n-th call returns the same name as before it.
    """
    _RUN.n_names += 1
    return f"{_RUN.name}/{_RUN.n_names}" if _RUN.name else ""
