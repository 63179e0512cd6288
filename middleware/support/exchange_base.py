"""What all exchanges share: a task, a mailbox, and a way to wait for mail."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any, Final

from dmiddleware.errors import DMiddlewareError, WaitTimeout
from dmiddleware.pipeline import Event, Role, SkipRest, Task, ThisNode, this_node
from middleware.support.checks import check_positive

__all__ = ["LEARNED", "MODEL", "Exchange"]

LEARNED: Final = Event("exchange.learned", delivery="latest")
"""The learner's counters, and the number of the learner that counts (see ``epoch``)."""

MODEL: Final = Event("exchange.model", delivery="latest")
"""The learner's weights, with their version."""

ENDED: Final = Event("exchange.ended", timeout_s=5.0)
"""The learner's last word, if it ends in good order without having stopped the run."""

_LOOK_S: Final = 0.2
"""How often a wait looks whether the task was stopped meanwhile, by a signal say."""


_log = logging.getLogger(__name__)


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
        self._left: dict[int, str] = {}
        self._learner_ended = False

    def setup(self, task: Task[Any]) -> None:
        """Subscribe to what the other processes tell."""
        self._task = task if task.router is not None else None
        self._node = this_node()
        if self._task is not None:
            task.on("node.left", self._handler(self._on_left))
            task.on("node.joined", self._handler(self._on_here))
            task.on("node.rejoined", self._handler(self._on_here))
            self._subscribe(task)

    def _subscribe(self, task: Task[Any]) -> None:
        raise NotImplementedError

    def _on_left(self, node_id: int, reason: str) -> None:
        self._left[node_id] = reason

    def _on_here(self, node_id: int, **_: Any) -> None:
        self._left.pop(node_id, None)

    def _tell_end(self) -> None:
        """Tell those who wait for this learner that nothing more comes, unless they know it.

        After a failure they are not told: it may be started again, and they wait for it.
        """
        task = self._task
        if task is None or task.finish or not task.stopped_ok or not task.has_role(Role.LEARNER):
            return
        try:
            task.emit(ENDED, only_remote=True)
        except DMiddlewareError as error:
            _log.warning("the others could not be told that the learner has ended: %s", error)

    def _hear_of_end(self, task: Task[Any]) -> None:
        """Wait for the learner no longer than it is at work."""
        task.on(ENDED, self._handler(self._on_ended))

    def _on_ended(self) -> None:
        self._learner_ended = True

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
            SkipRest: if the task is stopped, or if it has to be: the learner has ended.
            WaitTimeout: at the deadline; ``awaited()`` says what is waited for. It names the nodes
                that have left.
        """
        task = self._task
        assert task is not None
        clock, began = task.clock, task.clock.now()
        try:
            while not predicate():
                if self._learner_ended:
                    task.stop("the learner has ended", only_local=True)
                if task.finish:
                    raise SkipRest
                waited = clock.now() - began
                if waited >= self._timeout_s:
                    raise WaitTimeout(
                        f"{awaited()} did not come within {self._timeout_s:g} s{self._who_left()}"
                    )
                clock.wait_for(self._changed, predicate, min(_LOOK_S, self._timeout_s - waited))
        finally:
            blocked_s = clock.now() - began
            if self._node is not None:
                self._node.note_blocked(blocked_s)
        return blocked_s

    def _who_left(self) -> str:
        left = [f"node {node_id} ({reason})" for node_id, reason in sorted(self._left.items())]
        return f"; gone: {', '.join(left)}" if left else ""
