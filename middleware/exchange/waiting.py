"""Waiting for other nodes, which the middleware that exchange data have in common."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, Final

from dmiddleware.errors import WaitTimeout
from dmiddleware.pipeline import CurrentNode, EventRouter, Patience, SkipRest, Task, current_node
from dmiddleware.pipeline.task import ENDED
from middleware.base import BaseMiddleware, C
from middleware.context import OnlineRLContext
from middleware.exchange.events import WAITS, Counters
from middleware.roles import Role
from middleware.support.ranks import Ranks

__all__ = ["Exchange"]

_WAITS_EVERY_S: Final = 2.0
_WAITS_VALID_S: Final = 3 * _WAITS_EVERY_S

_COUNTERS: Final = ("env_step", "env_episode", "train_iter")

_log = logging.getLogger(__name__)


class Exchange(BaseMiddleware[C]):
    """Base of the middleware that exchange data; in a run of one process they do nothing.

    A node that is alive and works is waited for as long as it needs. The deadline of a wait counts
    while all nodes that are waited for are lost, have ended their part of the task, or make no
    progress: they wait themselves, and in the end for this node or for lost ones.

    Args:
        timeout_s: how long to wait for other nodes that are lost or make no progress.
    """

    needs_learner = True
    _has_peers = False
    # Of a run of several processes, from the set-up on.
    _task: Task[Any]
    _router: EventRouter

    def __init__(self, *, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._changed = threading.Condition()
        self._ranks = Ranks()
        self._node: CurrentNode | None = None
        self._left: dict[int, str] = {}
        self._waits: dict[int, tuple[float, list[int]]] = {}
        self._has_said = False
        self._learner_ended = False

    def setup(self, task: Task[Any]) -> None:
        """Subscribe to the events of the other nodes."""
        self._node = current_node()
        self._ranks = Ranks()
        if task.router is not None:
            self._has_peers, self._task, self._router = True, task, task.router
            task.at_stop(self._wake)
            task.on(ENDED, self._handler(self._on_ended))
            task.on(WAITS, self._handler(self._on_waits))
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
        return self._router.incarnation

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _on_left(self, node_id: int, reason: str) -> None:
        self._left[node_id] = reason

    def _on_joined(self, node_id: int, **_: Any) -> None:
        self._left.pop(node_id, None)

    def _on_ended(self, node_id: int, roles: list[str], how: str, is_over: bool) -> None:
        # After a failure the learner may be restarted, and is waited for.
        if is_over and self._follows and (not roles or Role.LEARNER in roles):
            self._learner_ended = True

    def _on_waits(self, node_id: int, awaited: list[int]) -> None:
        self._waits[node_id] = self._task.clock.now(), awaited

    def _handler(self, function: Callable[..., None]) -> Callable[..., None]:
        """Return a handler that runs ``function`` with the lock held, and wakes waiting threads."""

        def handle(*args: Any, **kwargs: Any) -> None:
            with self._changed:
                function(*args, **kwargs)
                self._changed.notify_all()

        return handle

    def _wait(
        self,
        predicate: Callable[[], bool],
        missing: Callable[[], str],
        awaited: Callable[[], list[int]],
    ) -> float:
        """Wait, with the lock held, until the predicate is true.

        Args:
            predicate: what to wait for.
            missing: names it in messages.
            awaited: returns the nodes that can bring it, as far as they are alive.

        Returns:
            The duration in seconds.

        Raises:
            SkipRest: if the task is stopped, or the learner has ended or gone on to another task.
            WaitTimeout: at the deadline, with ``missing()`` and the nodes that have left.
        """
        now = self._task.clock.now
        began = now()
        try:
            if not self._arrives(predicate, missing, awaited):
                raise self._interruption(missing)
        finally:
            blocked_s = now() - began
            if self._node is not None:
                self._node.note_blocked(blocked_s)
        return blocked_s

    def _arrives(
        self,
        predicate: Callable[[], bool],
        missing: Callable[[], str],
        awaited: Callable[[], list[int]],
    ) -> bool:
        """Wait until the predicate is true; return False if waiting longer is useless."""
        task, clock = self._task, self._task.clock

        def done() -> bool:
            return predicate() or self._learner_ended or task.finish

        patience = Patience(self._timeout_s, clock.now())
        told_at = clock.now() + _WAITS_EVERY_S
        while not clock.wait_for(self._changed, done, patience.next_look_s(clock.now())):
            now, nodes = clock.now(), awaited()
            hope = self._has_hope(nodes)
            if patience.is_over(now, hope=hope):
                return False
            if self._follows and not nodes and task.later_tasks(Role.LEARNER):
                self._learner_ended = True
            if now - told_at >= _WAITS_EVERY_S:
                told_at = now
                task.emit(WAITS, self._router.node_id, nodes, only_remote=True)
            if patience.should_say(now):
                self._say(missing(), patience.waited_s(now), nodes if hope else [])
        return predicate()

    @property
    def _follows(self) -> bool:
        """Whether this middleware cannot continue without a learner elsewhere."""
        return self.needs_learner and not self._task.has_role(Role.LEARNER)

    def _has_hope(self, nodes: Iterable[int]) -> bool:
        """Return whether one of the nodes makes progress, or one that they wait for."""
        valid_from = self._task.clock.now() - _WAITS_VALID_S
        seen, left = {self._router.node_id}, list(nodes)
        while left:
            node_id = left.pop()
            if node_id in seen:
                continue
            seen.add(node_id)
            told_at, awaited = self._waits.get(node_id, (-math.inf, []))
            if told_at < valid_from:
                return True
            left += awaited
        return False

    def _say(self, missing: str, waited_s: float, nodes: list[int]) -> None:
        since = time.strftime("%H:%M:%S", time.localtime(self._task.clock.wall() - waited_s))
        if nodes:
            outlook = (
                f"node(s) {', '.join(map(str, nodes))} can still bring it, so the wait continues; "
                f"timeout_s={self._timeout_s:g} counts while they are lost or wait themselves"
            )
        else:
            outlook = (
                f"no node can bring it at the moment{self._nodes_left()}; "
                f"the wait ends after timeout_s={self._timeout_s:g} without one"
            )
        # The first wait may be a mistake in the set-up; later ones are part of many runs.
        is_news = not self._has_said or waited_s >= self._timeout_s
        self._has_said = True
        _log.log(
            logging.WARNING if is_news else logging.INFO,
            "node %d has waited since %s (%.0f s) for %s: %s",
            self._router.node_id, since, waited_s, missing, outlook,
        )  # fmt: skip

    def _interruption(self, missing: Callable[[], str]) -> BaseException:
        """Return what ends a wait in which nothing has arrived."""
        task = self._task
        if self._learner_ended and not task.finish:
            later = task.later_tasks(Role.LEARNER)
            how = f"gone on to task {max(later.values())}" if later else "ended"
            task.stop(f"the learner has {how}", only_local=True)
        if task.finish:
            return SkipRest()
        late = f"{missing()} did not arrive within {self._timeout_s:g} s"
        return WaitTimeout(late + self._nodes_left())

    def _nodes_left(self) -> str:
        """Return which nodes are lost, and which are alive and have ended their part."""
        task = self._task
        left = [f"node {node_id} ({reason})" for node_id, reason in sorted(self._left.items())]
        text = f"; disconnected: {', '.join(left)}" if left else ""
        ended = [
            f"node {node_id}" + (f" ({how})" if how else "")
            for node_id, how in sorted(task.ended_peers.items())
        ]
        text += f"; ended their task: {', '.join(ended)}" if ended else ""
        later = [f"node {one} (task {number})" for one, number in task.later_tasks().items()]
        return text + (f"; gone on to a later task: {', '.join(later)}" if later else "")
