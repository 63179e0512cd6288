"""What the parts of a router share: the node behind its lock, and what follows when it changes.

Whoever has given a frame to the node calls :meth:`Core.after_input` with the lock held, and
:meth:`Core.pass_on` without it: so frames are made under the lock, and sent outside it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable
from functools import partial
from typing import Any, Final

from dmiddleware.errors import RouterError
from dmiddleware.pipeline import Clock
from dmiddleware.router.protocol.counters import Traffic
from dmiddleware.router.protocol.membership import Change
from dmiddleware.router.protocol.node import Node
from dmiddleware.router.runtime.receiver import Dispatcher, News
from dmiddleware.router.runtime.sender import Move, Pump
from dmiddleware.router.transport import Transport
from dmiddleware.router.wire.codec import Codec

__all__ = ["Core", "run"]

_logger = logging.getLogger(__name__)

TICK_S: Final = 0.25
"""How often a node looks at the time, if nothing is due before."""


class Core:
    """A node, and all that goes on around it.

    Args:
        node: used with :attr:`lock` held.
        transport: moves the bytes.
        codec: encodes and decodes events.
        clock: times deadlines.

    Attributes:
        lock: guards the node and everything else here.
        room: notified when emitters may find room, or wait in vain.
        members: notified when peers have come, gone, or said something of themselves.
        pump: sends what waits for peers.
        dispatcher: hands over what came from them.
        traffic: counts events.
        fatal: why this node cannot go on; emitters get it.
        closing: whether the threads are to end.
    """

    def __init__(self, node: Node, *, transport: Transport, codec: Codec, clock: Clock) -> None:
        self.node = node
        self.transport = transport
        self.codec = codec
        self.clock = clock
        self.lock = threading.RLock()
        self.room = threading.Condition(self.lock)
        self.members = threading.Condition(self.lock)
        self.traffic = Traffic()
        self.pump = Pump(node)
        self.dispatcher = Dispatcher(
            node,
            self.lock,
            codec=codec,
            traffic=self.traffic,
            clock=clock,
            on_wants=self.flush,
        )
        self.fatal: RouterError | None = None
        self.closing = False
        self._n_sessions = 0
        self._next_tick = 0.0

    def after_input(self, node_id: str | None = None) -> list[Move]:
        """Take note of what a frame or the time has changed; called with the lock held.

        Args:
            node_id: the peer that it concerns; None: maybe all.

        Returns:
            What is to be sent; give it to :meth:`pass_on`, without the lock.
        """
        now, node = self.clock.now(), self.node
        if node.changes:
            for change in node.changes:
                self.dispatcher.add(_news(change))
            node.changes.clear()
            self.members.notify_all()
        if node.n_sessions != self._n_sessions:
            # Polls that are parked in a session that is over end now.
            self._n_sessions, node_id = node.n_sessions, None
        moves = self.pump.moves(now, None if node_id is None else (node_id,))
        self.room.notify_all()
        if node_id is None or node.closing:
            self.members.notify_all()
        elif (due_at := node.due_at(node_id)) is not None and now < due_at < self._next_tick:
            self._next_tick = due_at
            self.members.notify_all()
        return moves

    def pass_on(self, moves: Iterable[Move]) -> None:
        """Hand over what came, and send what is to be sent; called without the lock."""
        # What came is awaited by more than who sent it; but who did may not wait for all of it.
        self.dispatcher.hand_over(once=True)
        run(moves)
        self.dispatcher.hand_over()

    def flush(self) -> None:
        """Send whatever can go, to all peers, and look again at all that is awaited."""
        with self.lock:
            moves = self.after_input()
        self.pass_on(moves)

    def fail(self, error: RouterError) -> None:
        """Take note of an error after which this node cannot go on."""
        with self.lock:
            self.fatal = error
            self.wake_all()
        _logger.error("%s", error)

    def end(self) -> None:
        """End all waits and threads; called with the lock held."""
        self.closing = True
        self.dispatcher.close()
        self.wake_all()

    def wake_all(self) -> None:
        """Let all who wait look again; called with the lock held."""
        self.room.notify_all()
        self.members.notify_all()

    def tick(self) -> None:
        """Do what is due by now, then wait until more may be."""
        with self.lock:
            now = self.clock.now()
            for node_id, undelivered in self.node.tick(now):
                self.dispatcher.add(("node.forgotten", (int(node_id), undelivered), {}))
            moves = self.pump.end_waits(now) + self.after_input()
            self._next_tick = now + TICK_S
        self.pass_on(moves)
        with self.lock:
            self._wait_for_tick()

    def _wait_for_tick(self) -> None:
        """Wait until something may be due, which a frame that comes meanwhile may bring nearer."""
        now = self.clock.now()
        due = (self.node.due_at(node_id) for node_id in self.node.links)
        # What is overdue has no way to go, and goes when there is one.
        soon = [time for time in due if time is not None and time > now]
        self._next_tick = min([self._next_tick, *soon])
        while not self.closing and (left_s := self._next_tick - self.clock.now()) > 0:
            planned = self._next_tick
            self.clock.wait_for(self.members, partial(self._is_tick_before, planned), left_s)

    def _is_tick_before(self, planned: float) -> bool:
        return self.closing or self._next_tick < planned


def run(moves: Iterable[Move]) -> None:
    """Send frames; called without the lock."""
    for move in moves:
        move()


def _news(change: Change) -> News:
    identity = change.peer.identity
    details: dict[str, Any]
    if change.kind == "joined":
        details = {"roles": identity.roles, "labels": identity.labels}
    elif change.kind == "left":
        details = {"reason": change.reason}
    else:
        details = {"new_incarnation": change.new_incarnation}
    return f"node.{change.kind}", (int(identity.node_id),), details
