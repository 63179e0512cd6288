"""What the exchange middleware share: waiting for peers, pacing, and telling senders apart."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any, Final

from dmiddleware.errors import DMiddlewareError, WaitTimeout
from dmiddleware.pipeline import CurrentNode, Event, Role, SkipRest, Task, current_node
from middleware.support.checks import check_positive

__all__ = ["LEARNED", "MODEL", "Exchange", "Pace"]

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
        self._node: CurrentNode | None = None
        self._left: dict[int, str] = {}
        self._learner_ended = False

    def setup(self, task: Task[Any]) -> None:
        """Subscribe to what the other processes tell."""
        self._task = task if task.router is not None else None
        self._node = current_node()
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


class Pace:
    """Says when a learner needs data before it may learn on.

    Args:
        samples_per_insert: rows that the learner draws for each row that is collected, from the
            step on in which it first learned (before, its buffer fills).
    """

    def __init__(self, samples_per_insert: float) -> None:
        self._ratio = samples_per_insert
        self._begin: tuple[int, int] | None = None
        self._drawn = 0
        self._stalled = False

    def begin(self, ctx: Any) -> None:
        """Have the rows counted that are drawn."""
        ctx.trained_env_step = getattr(ctx, "trained_env_step", 0)
        ctx.keep("trained_env_step")

    def wants_data(self, ctx: Any) -> bool:
        """Tell whether the next batch is to be taken in this step."""
        # Who may learn and does not lacks data: its buffer was cleared, say.
        return self._begin is None or self._stalled or not self.may_learn(ctx)

    def may_learn(self, ctx: Any) -> bool:
        """Tell whether fewer rows were drawn than the collected ones allow."""
        if self._begin is None:
            return True
        env_step, drawn = self._begin
        allowed = self._ratio * (ctx.env_step - env_step)
        return bool(ctx.trained_env_step - drawn < allowed)

    def end_step(self, ctx: Any) -> None:
        """Count from here, if this was the first step in which something was learned."""
        self._stalled = ctx.trained_env_step == self._drawn
        self._drawn = ctx.trained_env_step
        if self._begin is None and ctx.trained_env_step > 0:
            self._begin = ctx.env_step, ctx.trained_env_step

    def state_dict(self) -> dict[str, Any]:
        """Return where it is counted from."""
        return {"begin": None if self._begin is None else list(self._begin)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        begin = state["begin"]
        self._begin = None if begin is None else (int(begin[0]), int(begin[1]))
