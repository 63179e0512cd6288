"""Small functions that workers written for DI-engine call: ids, timers and the process group."""

from __future__ import annotations

import contextlib
import os
import time
import uuid
from types import TracebackType
from typing import Self

import torch

from dmiddleware.distributed import data_parallel
from dmiddleware.worker.ranks import rank_and_world_size

__all__ = ["EasyTimer", "dist_finalize", "dist_init", "get_task_uid"]


def get_task_uid() -> str:
    """Return an id that no other task has."""
    return uuid.uuid4().hex


class EasyTimer:
    """Measures how long a ``with`` block takes.

    Args:
        cuda: whether to wait for the GPU at the start and at the end, if there is one.

    Attributes:
        value: the duration of the last block, in seconds.

    Example:
        >>> timer = EasyTimer()
        >>> with timer:
        ...     total = sum(range(10))
        >>> timer.value >= 0
        True
    """

    def __init__(self, cuda: bool = True) -> None:
        self._waits_for_gpu = cuda and torch.cuda.is_available()
        self._began = 0.0
        self.value = 0.0

    def __enter__(self) -> Self:
        self.value = 0.0
        self._began = self._now()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.value = self._now() - self._began

    def _now(self) -> float:
        if self._waits_for_gpu:
            torch.cuda.synchronize()
        return time.perf_counter()


class _Group:
    """The process group that :func:`dist_init` joined; like torch, a process has at most one."""

    current: contextlib.ExitStack | None = None


def dist_init(
    backend: str | None = None,
    addr: str | None = None,
    port: str | int | None = None,
    rank: int | None = None,
    world_size: int | None = None,
) -> tuple[int, int]:
    """Join the process group of ``torch.distributed``, until :func:`dist_finalize`.

    New programs use ``with data_parallel():``, which also leaves the group after an error.

    Args:
        backend: see :func:`~dmiddleware.distributed.data_parallel`.
        addr: the host of rank 0; None: the variable ``MASTER_ADDR``, and so on.
        port: the port of rank 0.
        rank: this process's rank.
        world_size: the number of ranks.

    Returns:
        The rank and the number of ranks; 0 and 1 where nothing describes a group.

    Raises:
        ConfigError: if a variable is missing or is not a number.
        RankLost: if the other ranks do not join in time.
    """
    given = {"MASTER_ADDR": addr, "MASTER_PORT": port, "RANK": rank, "WORLD_SIZE": world_size}
    os.environ.update({name: str(value) for name, value in given.items() if value is not None})
    if _Group.current is None and not torch.distributed.is_initialized():
        _Group.current = contextlib.ExitStack()
        _Group.current.enter_context(data_parallel(backend=backend))
    return rank_and_world_size()


def dist_finalize() -> None:
    """Leave the process group that :func:`dist_init` joined; may be called twice."""
    group, _Group.current = _Group.current, None
    if group is not None:
        group.close()
