"""How many threads torch uses on the CPU in a run: one, unless somebody asks for more.

The networks of reinforcement learning are small, and more threads gain little there. Where several
runs, or the processes of one, share a host, they cost much: threads wait actively for each other.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import torch

__all__ = ["THREADS_VARIABLE", "chosen_threads", "limited_threads"]

THREADS_VARIABLE: Final = "OMP_NUM_THREADS"
"""The environment variable that asks for a number of threads."""

_DEFAULT_THREADS: Final = torch.get_num_threads()
"""What torch chooses; another number later was set by the program."""

_log = logging.getLogger(__name__)


def chosen_threads() -> int:
    """Return the number of threads for a run that starts now.

    It is that of ``OMP_NUM_THREADS``, or of a call of ``torch.set_num_threads`` in the program;
    otherwise one.
    """
    now = torch.get_num_threads()
    return now if THREADS_VARIABLE in os.environ or now != _DEFAULT_THREADS else 1


@contextmanager
def limited_threads(*, says: bool = True) -> Iterator[None]:
    """Let torch use :func:`chosen_threads` while the block runs, and as many as before after it.

    Args:
        says: whether the log says how many there are.
    """
    before, chosen = torch.get_num_threads(), chosen_threads()
    torch.set_num_threads(chosen)
    if says:
        _log.info(
            "torch uses %d thread(s) on the CPU; for another number set %s, or let the program "
            "call torch.set_num_threads, or use --resources ROLE:cpu=N with ditask",
            chosen,
            THREADS_VARIABLE,
        )
    try:
        yield
    finally:
        torch.set_num_threads(before)
