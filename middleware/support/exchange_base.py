"""Shared by the middleware that exchange data: waiting for other nodes, and pacing."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeAlias

from dmiddleware.errors import DMiddlewareError, WaitTimeout
from dmiddleware.pipeline import (
    CurrentNode,
    Event,
    OnlineRLContext,
    Role,
    SkipRest,
    Task,
    current_node,
)
from middleware.support.checks import check_positive
from middleware.support.ranks import Ranks

__all__ = [
    "CONSUMED",
    "LEARNED",
    "MODEL",
    "UPDATED",
    "Counters",
    "Exchange",
    "Pace",
    "merge_counters",
]

Counters: TypeAlias = Mapping[str, int]
"""``env_step``, ``env_episode`` and ``train_iter`` of the learner, its ``epoch`` and ``ranks``.

A learner that is restarted has a larger epoch than any before it: the incarnation of its router, on
which its peers agree.
"""

LEARNED: Final = Event("exchange.learned", delivery="latest")
"""The learner's counters: when it starts, when a node joins, and to nodes that wait for them."""

CONSUMED: Final = Event("exchange.consumed", timeout_s=120.0)
"""To the sender of a batch: its token, the batch's number, and the learner's counters."""

MODEL: Final = Event("exchange.model", delivery="latest")
"""The learner's counters and weights."""

UPDATED: Final = Event("exchange.updated", delivery="latest")
"""Within a process: the counters with which weights have arrived."""

ENDED: Final = Event("exchange.ended", timeout_s=5.0)
"""Sent by a learner that ends without an error and without having stopped the run."""

_COUNTERS: Final = ("env_step", "env_episode", "train_iter")

_log = logging.getLogger(__name__)


class Exchange:
    """Base of the middleware that exchange data; in a run of one process they do nothing.

    Args:
        timeout_s: how long to wait for other nodes.

    Raises:
        ValueError: if ``timeout_s`` is not positive.
    """

    roles: tuple[str, ...] = ()

    def __init__(self, *, timeout_s: float) -> None:
        check_positive(timeout_s=timeout_s)
        self._timeout_s = timeout_s
        self.settings: dict[str, Any] = {"timeout_s": timeout_s}
        self._changed = threading.Condition()
        self._ranks = Ranks()
        self._task: Task[Any] | None = None
        self._node: CurrentNode | None = None
        self._left: dict[int, str] = {}
        self._learner_ended = False

    def setup(self, task: Task[Any]) -> None:
        """Subscribe to the events of the other nodes."""
        self._task = task if task.router is not None else None
        self._node = current_node()
        self._ranks = Ranks()
        if self._task is not None:
            task.at_stop(self._wake)
            task.on("node.left", self._handler(self._on_left))
            task.on("node.joined", self._handler(self._on_joined))
            task.on("node.rejoined", self._handler(self._on_joined))
            self._subscribe(task)

    def _subscribe(self, task: Task[Any]) -> None:
        raise NotImplementedError

    def _counters(self, ctx: OnlineRLContext) -> Counters:
        """Return the counters of this learner."""
        counters = {name: getattr(ctx, name) for name in _COUNTERS}
        return {**counters, "epoch": self._epoch(), "ranks": self._ranks.size}

    def _epoch(self) -> int:
        assert self._task is not None and self._task.router is not None
        return self._task.router.incarnation

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _on_left(self, node_id: int, reason: str) -> None:
        self._left[node_id] = reason

    def _on_joined(self, node_id: int, **_: Any) -> None:
        self._left.pop(node_id, None)

    def _announce_end(self) -> None:
        """Notify the nodes that wait for this learner that it ends, unless they know already.

        After a failure they are not notified: the learner may be restarted, and they wait for it.
        """
        task = self._task
        if task is None or task.finish or not task.stopped_ok or not task.has_role(Role.LEARNER):
            return
        if not self._ranks.leads:
            return
        try:
            task.emit(ENDED, only_remote=True)
        except DMiddlewareError as error:
            _log.warning("cannot notify the other nodes that the learner has ended: %s", error)

    def _watch_for_end(self, task: Task[Any]) -> None:
        """Stop waiting when the learner ends."""
        task.on(ENDED, self._handler(self._on_ended))

    def _on_ended(self) -> None:
        self._learner_ended = True

    def _handler(self, function: Callable[..., None]) -> Callable[..., None]:
        """Return a handler that runs ``function`` with the lock held, and wakes waiting threads."""

        def handle(*args: Any, **kwargs: Any) -> None:
            with self._changed:
                function(*args, **kwargs)
                self._changed.notify_all()

        return handle

    def _wait(self, predicate: Callable[[], bool], missing: Callable[[], str]) -> float:
        """Wait, with the lock held, until the predicate is true.

        Returns:
            The duration in seconds.

        Raises:
            SkipRest: if the task is stopped, or the learner has ended.
            WaitTimeout: at the deadline, with ``missing()`` and the nodes that have left.
        """
        task = self._task
        assert task is not None
        clock, began = task.clock, task.clock.now()

        def done() -> bool:
            return predicate() or self._learner_ended or task.finish

        try:
            arrived = clock.wait_for(self._changed, done, self._timeout_s) and predicate()
        finally:
            blocked_s = clock.now() - began
            if self._node is not None:
                self._node.note_blocked(blocked_s)
        if not arrived:
            if self._learner_ended:
                task.stop("the learner has ended", only_local=True)
            if task.finish:
                raise SkipRest
            late = f"{missing()} did not arrive within {self._timeout_s:g} s"
            raise WaitTimeout(late + self._nodes_left())
        return blocked_s

    def _nodes_left(self) -> str:
        left = [f"node {node_id} ({reason})" for node_id, reason in sorted(self._left.items())]
        return f"; disconnected: {', '.join(left)}" if left else ""


def merge_counters(known: Counters | None, new: Counters) -> Counters:
    """Return the newest counters; those of an earlier learner are ignored."""
    if known is None or new["epoch"] > known["epoch"]:
        return new
    if new["epoch"] < known["epoch"]:
        return known
    # They arrive over several streams, so older ones may arrive later.
    return {name: max(value, new[name]) for name, value in known.items()}


class Pace:
    """Decides when a learner has to wait for data before further updates.

    Args:
        samples_per_insert: rows that the learner draws per collected row, counted from the step of
            its first update. Before that, its buffer fills.
    """

    def __init__(self, samples_per_insert: float) -> None:
        self._ratio = samples_per_insert
        self._begin: tuple[int, int] | None = None
        self._drawn = 0
        self._stalled = False

    def begin(self, ctx: OnlineRLContext) -> None:
        """Start to count the rows that are drawn."""
        ctx.trained_env_step = getattr(ctx, "trained_env_step", 0)  # type: ignore[attr-defined]
        ctx.keep("trained_env_step")

    def wants_data(self, ctx: OnlineRLContext) -> bool:
        """Return whether this step should take the next batch."""
        # A learner that may learn and did not lacks data; its buffer may have been cleared.
        return self._begin is None or self._stalled or not self.may_learn(ctx)

    def may_learn(self, ctx: OnlineRLContext) -> bool:
        """Return whether the collected rows allow further draws."""
        if self._begin is None:
            return True
        env_step, drawn = self._begin
        allowed = self._ratio * (ctx.env_step - env_step)
        return _drawn(ctx) - drawn < allowed

    def end_step(self, ctx: OnlineRLContext) -> None:
        """Start to count, if this step had the first update."""
        drawn = _drawn(ctx)
        self._stalled = drawn == self._drawn
        self._drawn = drawn
        if self._begin is None and drawn > 0:
            self._begin = ctx.env_step, drawn

    def state_dict(self) -> dict[str, Any]:
        """Return the counters at the start."""
        return {"begin": None if self._begin is None else list(self._begin)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        begin = state["begin"]
        self._begin = None if begin is None else (int(begin[0]), int(begin[1]))


def _drawn(ctx: OnlineRLContext) -> int:
    drawn: int = ctx.trained_env_step  # type: ignore[attr-defined]
    return drawn
