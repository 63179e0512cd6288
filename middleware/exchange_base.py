"""What all exchanges share: a task, a mailbox, and a way to wait for mail."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Final

from dmiddleware.errors import WaitTimeout
from dmiddleware.pipeline import Event, SkipRest, Task, ThisNode, this_node
from middleware.checks import check_positive

__all__ = ["LEARNED", "MODEL", "Exchange"]

LEARNED: Final = Event("exchange.learned", delivery="latest")
"""The learner's counters, and the number of the learner that counts (see ``epoch``)."""

MODEL: Final = Event("exchange.model", delivery="latest")
"""The learner's weights, with their version."""

_LOOK_S: Final = 0.2
"""How often a wait looks whether the task was stopped meanwhile, by a signal say."""


class Exchange:
    """Base of what the processes of a run tell each other; in a run of one process it is silent.

    Args:
        timeout_s: how long to wait for the others.

    Raises:
        ValueError: if ``timeout_s`` is not positive.
    """

    roles: tuple[str, ...] = ()

    def __init__(self, *, timeout_s: float) -> None:
        check_positive(timeout_s=timeout_s)
        self._timeout_s = timeout_s
        self._changed = threading.Condition()
        self._task: Task[Any] | None = None
        self._node: ThisNode | None = None

    def setup(self, task: Task[Any]) -> None:
        """Subscribe to what the other processes tell."""
        self._task = task if task.router is not None else None
        self._node = this_node()
        if self._task is not None:
            self._subscribe(task)

    def _subscribe(self, task: Task[Any]) -> None:
        raise NotImplementedError

    def _handler(self, function: Callable[..., None]) -> Callable[..., None]:
        """Return a handler that runs ``function`` with the mailbox locked, and wakes who waits."""

        def handle(*args: Any, **kwargs: Any) -> None:
            with self._changed:
                function(*args, **kwargs)
                self._changed.notify_all()

        return handle

    def _wait(self, predicate: Callable[[], bool], awaited: Callable[[], str]) -> float:
        """Wait, with the mailbox locked, until something holds or the task is stopped.

        Returns:
            The seconds that it took.

        Raises:
            SkipRest: if the task is stopped.
            WaitTimeout: at the deadline; ``awaited()`` says what is waited for.
        """
        task = self._task
        assert task is not None
        clock, began = task.clock, task.clock.now()
        try:
            while not predicate():
                if task.finish:
                    raise SkipRest
                waited = clock.now() - began
                if waited >= self._timeout_s:
                    raise WaitTimeout(f"{awaited()} did not come within {self._timeout_s:g} s")
                clock.wait_for(self._changed, predicate, min(_LOOK_S, self._timeout_s - waited))
        finally:
            blocked_s = clock.now() - began
            if self._node is not None:
                self._node.note_blocked(blocked_s)
        return blocked_s
