"""Waiting for other nodes, which the middleware that exchange data have in common."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, Final

from dmiddleware.errors import WaitTimeout
from dmiddleware.pipeline import EventRouter, Patience, SkipRest, Task, current_node
from dmiddleware.pipeline.peers import ENDED
from middleware.exchange.events import WAITS
from middleware.roles import Role

__all__ = ["Outlook", "Waiting"]

_WAITS_EVERY_S: Final = 2.0
_WAITS_VALID_S: Final = 3 * _WAITS_EVERY_S

_log = logging.getLogger(__name__)


class Outlook:
    """What a node knows of the nodes that it may wait for. Pure: no lock, no clock.

    Args:
        follows: whether the node cannot continue without a learner elsewhere.
        learner_roles: the roles of that learner.

    Attributes:
        follows: the same.
        left: the nodes that have left, each with the reason.
        learner_ended: whether the learner has ended for good.
    """

    def __init__(self, *, follows: bool, learner_roles: Iterable[str] = (Role.LEARNER,)) -> None:
        self.follows = follows
        self._learner_roles = frozenset(learner_roles)
        self.left: dict[int, str] = {}
        self.learner_ended = False
        self._waits: dict[int, tuple[float, list[int]]] = {}

    def on_left(self, node_id: int, reason: str) -> None:
        """Note that a node has left."""
        self.left[node_id] = reason

    def on_joined(self, node_id: int, **_: Any) -> None:
        """Note that a node has joined, for the first time or again."""
        self.left.pop(node_id, None)

    def on_ended(self, node_id: int, roles: list[str], how: str, is_over: bool) -> None:
        """Note that a node's part of the task has ended."""
        # After a failure the learner may be restarted, and is waited for.
        if is_over and self.follows and (not roles or not self._learner_roles.isdisjoint(roles)):
            self.learner_ended = True

    def on_waits(self, now: float, node_id: int, awaited: list[int]) -> None:
        """Note for which nodes a node waits."""
        self._waits[node_id] = now, awaited

    def has_hope(self, nodes: Iterable[int], *, own: int, now: float) -> bool:
        """Return whether one of the nodes makes progress, or one that they wait for.

        Args:
            nodes: the nodes that are waited for, as far as they are alive.
            own: the node that waits for them.
            now: the time in seconds.
        """
        visited, unvisited = {own}, list(nodes)
        while unvisited:
            node_id = unvisited.pop()
            if node_id in visited:
                continue
            visited.add(node_id)
            told_at, awaited = self._waits.get(node_id, (-math.inf, []))
            if told_at < now - _WAITS_VALID_S:
                return True
            unvisited += awaited
        return False


class Waiting:
    """The waits of one middleware for other nodes.

    A node that is alive and works is waited for as long as it needs. The deadline of a wait counts
    while all nodes that are waited for are lost, have ended their part of the task, or make no
    progress: they wait themselves, and in the end for this node or for lost ones.

    Args:
        task: the task of this node, which has a router.
        timeout_s: how long to wait for other nodes that are lost or make no progress.
        needs_learner: whether the middleware cannot continue once the learner has ended.

    Attributes:
        task: the same.
        node: the current node.
        changed: guards what is waited for, and is notified when it changes.
        outlook: what is known of the other nodes.
    """

    def __init__(self, task: Task[Any], *, timeout_s: float, needs_learner: bool = True) -> None:
        self.task = task
        self.node = current_node()
        self.changed = threading.Condition()
        self.outlook = Outlook(
            follows=needs_learner and not task.has_role(Role.LEARNER),
            learner_roles=task.roles_for(Role.LEARNER),
        )
        self._timeout_s = timeout_s
        self._has_said = False
        task.at_stop(self._wake)
        self.on(ENDED, self.outlook.on_ended)
        self.on(WAITS, lambda *waits: self.outlook.on_waits(task.clock.now(), *waits))
        self.on("node.left", self.outlook.on_left)
        self.on("node.joined", self.outlook.on_joined)
        self.on("node.rejoined", self.outlook.on_joined)

    @property
    def router(self) -> EventRouter:
        """The router of the task."""
        router = self.task.router
        assert router is not None
        return router

    def on(self, event: Any, function: Callable[..., None]) -> None:
        """Call the function for each emission of the event, with the lock, and end waits."""

        def handle(*args: Any, **kwargs: Any) -> None:
            with self.changed:
                function(*args, **kwargs)
                self.changed.notify_all()

        self.task.on(event, handle)

    def until(
        self,
        predicate: Callable[[], bool],
        *,
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
        now = self.task.clock.now
        began = now()
        try:
            if not self._arrives(predicate, missing, awaited):
                raise self._interruption(missing)
        finally:
            blocked_s = now() - began
            if self.node is not None:
                self.node.note_blocked(blocked_s)
        return blocked_s

    def _wake(self) -> None:
        with self.changed:
            self.changed.notify_all()

    def _arrives(
        self,
        predicate: Callable[[], bool],
        missing: Callable[[], str],
        awaited: Callable[[], list[int]],
    ) -> bool:
        """Wait until the predicate is true; return False if waiting longer is useless."""
        task, clock, outlook, node_id = (
            self.task,
            self.task.clock,
            self.outlook,
            self.router.node_id,
        )

        def done() -> bool:
            return predicate() or outlook.learner_ended or task.finish

        patience = Patience(self._timeout_s, clock.now())
        told_at = clock.now() + _WAITS_EVERY_S
        while not clock.wait_for(self.changed, done, patience.next_look_s(clock.now())):
            now, nodes = clock.now(), awaited()
            hope = outlook.has_hope(nodes, own=node_id, now=now)
            if patience.is_over(now, hope=hope):
                return False
            if outlook.follows and not nodes and task.later_tasks(Role.LEARNER):
                outlook.learner_ended = True
            if now - told_at >= _WAITS_EVERY_S:
                told_at = now
                task.emit(WAITS, node_id, nodes, only_remote=True)
            if patience.should_say(now):
                self._say(missing(), patience.waited_s(now), nodes if hope else [])
        return predicate()

    def _say(self, missing: str, waited_s: float, nodes: list[int]) -> None:
        since = time.strftime("%H:%M:%S", time.localtime(self.task.clock.wall() - waited_s))
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
            self.router.node_id, since, waited_s, missing, outlook,
        )  # fmt: skip

    def _interruption(self, missing: Callable[[], str]) -> BaseException:
        """Return what ends a wait in which nothing has arrived."""
        task = self.task
        if self.outlook.learner_ended and not task.finish:
            later = task.later_tasks(Role.LEARNER)
            how = f"gone on to task {max(later.values())}" if later else "ended"
            task.stop(f"the learner has {how}", only_local=True)
        if task.finish:
            return SkipRest()
        late = f"{missing()} did not arrive within {self._timeout_s:g} s"
        return WaitTimeout(late + self._nodes_left())

    def _nodes_left(self) -> str:
        """Return which nodes are lost, and which are alive and have ended their part."""
        task = self.task
        lost = sorted(self.outlook.left.items())
        departures = [f"node {node_id} ({reason})" for node_id, reason in lost]
        text = f"; disconnected: {', '.join(departures)}" if departures else ""
        ended = [
            f"node {node_id}" + (f" ({how})" if how else "")
            for node_id, how in sorted(task.ended_peers.items())
        ]
        text += f"; ended their task: {', '.join(ended)}" if ended else ""
        later = [f"node {peer} (task {number})" for peer, number in task.later_tasks().items()]
        return text + (f"; gone on to a later task: {', '.join(later)}" if later else "")
