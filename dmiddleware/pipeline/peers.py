"""What a task and its peers, the tasks of the same number in other processes, say to each other."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Sequence
from typing import Final

from dmiddleware.errors import DMiddlewareError
from dmiddleware.event_names import ROLE_EVENTS, scoped_name
from dmiddleware.pipeline.current_node import CurrentNode
from dmiddleware.pipeline.event import Event
from dmiddleware.pipeline.event_bus import EventBus, EventRouter, PeerTask
from dmiddleware.pipeline.lifecycle import StopRequest
from dmiddleware.pipeline.plan import PlanItem
from dmiddleware.pipeline.preflight import (
    asks_for_roles,
    chain_error,
    idle_part,
    parts_without_process,
    undecided_roles,
)

__all__ = ["ENDED", "Peers"]

_logger = logging.getLogger(__name__)

_STOPPED = Event("task.stopped")
ENDED: Final = Event("task.ended", timeout_s=5.0)
"""Sent by every task that is closed: its node and roles, its error if it has failed, and whether
those that wait for it should stop too."""
# How long the end of a run waits for the subscriptions of peers that have just connected.
_ANNOUNCED_S = 1.0


class Peers:
    """The peers of a task: those that take part, their roles, and how stops and ends spread.

    Args:
        router: carries events to and from the peers.
        events: the event bus of the task.
        number: which task of the program it is.
        node: the node that this process is in the run; None: unknown.
        on_stop: called with a stop that another node has decided.

    Attributes:
        ended: the nodes whose part of the task has ended, with the error if it has failed.
        were_stopped: whether the peers were asked to stop too.
    """

    def __init__(
        self,
        router: EventRouter,
        events: EventBus,
        *,
        number: int,
        node: CurrentNode | None,
        on_stop: Callable[[StopRequest], object],
    ) -> None:
        self.ended: dict[int, str] = {}
        self.were_stopped = False
        self._router = router
        self._events = events
        self._number = number
        self._node = node
        self._on_stop = on_stop
        self._announced_roles: set[str] = set()
        self._relayed_stop: StopRequest | None = None
        self._informed: set[int] = set()
        self._informing = threading.Lock()
        events.on(_STOPPED, self._on_peer_stopped)
        events.on(ENDED, self._on_peer_ended)
        events.on("node.left", self._on_peer_left)
        events.on("node.rejoined", self._on_peer_rejoined)

    def participants(self, roles: Collection[str]) -> list[int]:
        """Return the node ids of the connected peers that the task can wait for.

        Args:
            roles: only peers that have one of these roles; none: all.
        """
        return [
            node_id
            for node_id, peer in self._tasks(roles).items()
            if node_id not in self.ended
            and (peer.number < self._number or (peer.takes_part and peer.number == self._number))
        ]

    def later_tasks(self, roles: Collection[str] = ()) -> dict[int, int]:
        """Return the connected peers that have gone on to a later task, and to which.

        Args:
            roles: only peers that have one of these roles; none: all.
        """
        return {
            node_id: peer.number
            for node_id, peer in self._tasks(roles).items()
            if peer.number > self._number
        }

    def wait_until_ready(self, *, stopped: Callable[[], bool]) -> int:
        """Wait until the peers are ready for the task.

        Args:
            stopped: ends the wait early when it returns True.

        Returns:
            The later task that all of them have reached; 0: they take part in this one.
        """
        if self._router.wait_until_ready(stopped=stopped, task=self._number) or stopped():
            return 0
        later = min(self.later_tasks().values(), default=self._number + 1)
        _logger.warning(
            "task %d of this run is over: the peers are in task %d, so node %d runs no step of "
            "it; only a snapshot can restore what this task had done",
            self._number,
            later,
            self._router.node_id,
        )
        return later

    def announce_roles(self, roles: frozenset[str]) -> None:
        """Let the peers know the roles that only the program has given to this task."""
        planned = () if self._node is None else self._node.roles
        for role in roles.difference(planned, self._announced_roles):
            self._announced_roles.add(role)
            self._events.on(f"{ROLE_EVENTS}{role}", lambda: None)

    def check_roles(
        self, plan: Sequence[PlanItem], roles: frozenset[str], *, lead: str | None
    ) -> None:
        """Check that each part of the chain has a process, now that the peers are known.

        Args:
            plan: the chain, and what its middleware call by hand.
            roles: those of this process.
            lead: the role that checks this for all others.

        Raises:
            ChainError: if one has none, and none can join.
        """
        node = self._node
        decides = node is not None and node.decides_roles
        # A process without roles has them all.
        if not roles and not decides:
            return
        peers = self._router.peer_tasks(_STOPPED.name)
        if decides and peers:
            decided = {n: peer.roles for n, peer in peers.items() if peer.number >= self._number}
            decided[self._router.node_id] = tuple(map(str, roles))
            if problem := undecided_roles(plan, decided, lead=lead):
                raise chain_error([problem])
        if not roles or not all(peer.roles for peer in peers.values()):
            return
        planned = None if node is None else node.run_roles
        run_roles = {*map(str, roles), *map(str, planned or ())}
        run_roles.update(role for peer in peers.values() for role in peer.roles)
        idle = [
            item
            for item in parts_without_process(plan, run_roles)
            if not any(self._events.subscribers(f"{ROLE_EVENTS}{r}") for r in item.roles)
        ]
        if not idle or not asks_for_roles(roles, run_roles, lead=lead):
            return
        # Without a launcher's plan, nobody knows who may still come.
        may_grow = node is None or node.may_grow or (planned is None and not decides)
        problems = [
            idle_part(item, run_roles, lead=lead, may_grow=may_grow, decides=decides)
            for item in idle
        ]
        if not may_grow:
            raise chain_error(problems)
        for problem in problems:
            _logger.warning("%s", problem)

    def stop(self, stop: StopRequest) -> None:
        """Stop the peers that do not know of the stop yet, such as late ones."""
        self.were_stopped = True
        if self._node is not None:
            self._node.on_end()
        self._send_stop(stop, self._events.subscribers(_STOPPED, timeout_s=_ANNOUNCED_S))

    def announce_end(self, roles: frozenset[str], how: str, *, is_over: bool) -> None:
        """Notify the peers that the task has ended here, although its process lives on.

        An interrupted process does not: the one that replaces it continues.

        Args:
            roles: those of this process.
            how: the error if it has failed; empty: it has not.
            is_over: whether those that wait for it should stop too.
        """
        if self._node is not None and self._node.interrupted:
            return
        try:
            if peers := self._events.subscribers(ENDED):
                names = sorted(map(str, roles))
                self._events.emit(
                    ENDED, self._router.node_id, names, how, is_over, only_remote=True, to=peers
                )
        except DMiddlewareError as error:
            _logger.info("failed to notify the peers that the task has ended: %s", error)

    def origin_of(self, stop: StopRequest) -> int:
        """Return the node that decided a stop, this one included."""
        return self._router.node_id if stop.origin is None else stop.origin

    def _tasks(self, roles: Collection[str]) -> dict[int, PeerTask]:
        peers = self._router.peer_tasks(scoped_name(_STOPPED.name, self._number))
        return {
            node_id: peer
            for node_id, peer in peers.items()
            # A peer without roles has them all.
            if not (roles and peer.roles) or not {*roles}.isdisjoint(peer.roles)
        }

    def _send_stop(self, stop: StopRequest, subscribers: Collection[int]) -> None:
        origin = self.origin_of(stop)
        with self._informing:
            peers = {*subscribers} - {origin, *self._informed}
            self._informed |= peers
        if not peers:
            return
        try:
            self._events.emit(
                _STOPPED,
                *(origin, stop.reason, stop.ok),
                final=stop.final,
                sender=self._router.node_id,
                only_remote=True,
                to=peers,
            )
        except DMiddlewareError as error:
            _logger.warning("failed to stop the tasks of the peers: %s", error)

    def _on_peer_stopped(
        self, node_id: int, reason: str, ok: bool, *, final: bool, sender: int
    ) -> None:
        stop = StopRequest(reason, ok=ok, final=final, origin=node_id)
        if sender != node_id and node_id in self._router.peer_ids():
            # Its own message arrives too, after everything else that it has sent, unless it leaves.
            self._relayed_stop = stop
        else:
            self._accept_stop(stop, sender)

    def _on_peer_left(self, node_id: int, reason: str) -> None:
        stop = self._relayed_stop
        if stop is not None and stop.origin == node_id:
            self._accept_stop(stop, node_id)

    def _on_peer_ended(self, node_id: int, roles: list[str], how: str, is_over: bool) -> None:
        self.ended[node_id] = how

    def _on_peer_rejoined(self, node_id: int, new_incarnation: bool) -> None:
        if new_incarnation:
            self.ended.pop(node_id, None)
            with self._informing:
                self._informed.discard(node_id)

    def _accept_stop(self, stop: StopRequest, sender: int) -> None:
        """Stop because of a peer, and at once stop the peers that its message may not reach."""
        self._on_stop(stop)
        with self._informing:
            self._informed.add(sender)
        self._send_stop(stop, self._events.subscribers(_STOPPED))
