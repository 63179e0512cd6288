"""The process as a node of a run: what a task joins when its program says nothing else.

A program that builds ``Task(ctx)`` runs alone. Within :func:`running_as`, which the launcher wraps
around it, the very same program gets the node's router, roles and labels.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

from dmiddleware.pipeline.clock import Clock, SystemClock
from dmiddleware.pipeline.events import EventRouter

__all__ = ["Progress", "ThisNode", "running_as", "this_node"]


class _StoppableTask(Protocol):
    ctx: Any

    def stop(self, reason: str, *, ok: bool = True, only_local: bool = False) -> None: ...

    @property
    def stop_reason(self) -> str | None: ...

    @property
    def stopped_ok(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a node's tasks are.

    Attributes:
        step: steps of the chain.
        env_step: environment steps.
        train_iter: updates.
    """

    step: int = 0
    env_step: int = 0
    train_iter: int = 0


class ThisNode:
    """One process of a run.

    Args:
        router: carries events to and from the others.
        roles: the parts that this process plays; none: all.
        labels: names to find it by.
        clock: times what its tasks wait for; None: the clock of the machine.
    """

    def __init__(
        self,
        *,
        router: EventRouter | None = None,
        roles: tuple[str, ...] = (),
        labels: tuple[str, ...] = (),
        clock: Clock | None = None,
    ) -> None:
        self.router = router
        self.roles = roles
        self.labels = labels
        self.clock: Clock = clock if clock is not None else SystemClock()
        self._lock = threading.Lock()
        self._tasks: list[_StoppableTask] = []
        self._stop: tuple[str, bool, bool] | None = None

    def register(self, task: _StoppableTask) -> None:
        """Take note of a task of this process; if the process was told to end, stop it at once."""
        with self._lock:
            self._tasks.append(task)
            stop = self._stop
        if stop is not None:
            task.stop(stop[0], ok=stop[1], only_local=stop[2])

    def stop(self, reason: str, *, ok: bool = True, only_local: bool = False) -> None:
        """Stop every task of this process, and those that it begins later.

        Args:
            reason: why.
            ok: False says that the run has failed.
            only_local: leave the peers alone, which go on without this process.
        """
        with self._lock:
            if self._stop is None:
                self._stop = (reason, ok, only_local)
            tasks = list(self._tasks)
        for task in tasks:
            task.stop(reason, ok=ok, only_local=only_local)

    @property
    def stop_reason(self) -> str | None:
        """Why the last task stopped, or None."""
        reasons = [task.stop_reason for task in self._tasks if task.stop_reason]
        return reasons[-1] if reasons else None

    @property
    def stopped_ok(self) -> bool:
        """Whether no task was stopped because something failed."""
        return all(task.stopped_ok for task in self._tasks)

    def progress(self) -> Progress:
        """Return how far the tasks are; each counter is that of the task that is farthest."""
        contexts = [task.ctx for task in list(self._tasks)]
        return Progress(
            step=max((ctx.total_step for ctx in contexts), default=0),
            env_step=max((getattr(ctx, "env_step", 0) for ctx in contexts), default=0),
            train_iter=max((getattr(ctx, "train_iter", 0) for ctx in contexts), default=0),
        )


_current: ContextVar[ThisNode | None] = ContextVar("dmiddleware.this_node", default=None)


def this_node() -> ThisNode | None:
    """Return the node that this program runs as, or None if it runs alone."""
    return _current.get()


@contextlib.contextmanager
def running_as(node: ThisNode) -> Iterator[ThisNode]:
    """Let tasks that are built within join the network as ``node``."""
    token = _current.set(node)
    try:
        yield node
    finally:
        _current.reset(token)
