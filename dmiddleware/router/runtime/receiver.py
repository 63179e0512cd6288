"""Receiving: delivers the peers' events to the task, in order, on whichever thread has them."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, Final, NamedTuple, TypeAlias

from dmiddleware.errors import DecodeError
from dmiddleware.event_names import base_name
from dmiddleware.pipeline import Clock
from dmiddleware.pipeline.event_bus import Accept, Done
from dmiddleware.router.protocol.counters import TrafficCounters
from dmiddleware.router.protocol.node import NodeProtocol, TakenEvent
from dmiddleware.router.protocol.peer import Peer
from dmiddleware.router.wire.codec import Codec

__all__ = ["DecodedEvent", "Receiver"]

_logger = logging.getLogger(__name__)


class DecodedEvent(NamedTuple):
    """An event's name and arguments; with the function to call when it was handled, if any."""

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    done: Done | None = None


_Item: TypeAlias = DecodedEvent | TakenEvent

_BATCH: Final = 256


class Receiver:
    """Delivers events one at a time and in order.

    The thread that received an event delivers it and wakes no other thread. Once an event is
    refused, it and all that follow are left to a thread that may wait.

    Args:
        node: has the received events.
        lock: guards the node.
        codec: decodes events.
        traffic: counts them.
        clock: times the waits.
        on_subscriptions_changed: called without the lock when a peer has announced subscriptions.
        on_taken: called without the lock when there is something to send because events were taken.
        on_handled: called without the lock with the peer whose oldest event that is acknowledged
            when handled was handled.
    """

    def __init__(
        self,
        node: NodeProtocol,
        lock: threading.RLock,
        *,
        codec: Codec,
        traffic: TrafficCounters,
        clock: Clock,
        on_subscriptions_changed: Callable[[], None],
        on_taken: Callable[[], None],
        on_handled: Callable[[Peer], None],
    ) -> None:
        self._node = node
        self._lock = lock
        self._codec = codec
        self._traffic = traffic
        self._clock = clock
        self._on_subscriptions_changed = on_subscriptions_changed
        self._on_taken = on_taken
        self._on_handled = on_handled
        self._changed = threading.Condition(lock)
        self._local: deque[DecodedEvent] = deque()
        self._undelivered: deque[_Item] = deque()
        self._unhandled: list[TakenEvent] = []
        self._accept: Accept | None = None
        # One thread at a time delivers; the blocking one continues until nothing is left.
        self._busy = False
        self._must_block = False
        self._closing = False

    def attach(self, accept: Accept) -> None:
        """Deliver events to this function from now on."""
        with self._lock:
            self._accept = accept
            # The program before this one has not handled them.
            self._undelivered.extendleft(reversed(self._unhandled))
            self._unhandled.clear()
            self._must_block = False
            self._changed.notify()
        self.deliver_ready()

    @property
    def attached(self) -> bool:
        """Whether there is a function to deliver events to."""
        return self._accept is not None

    def wait_until_delivered(self, timeout_s: float) -> None:
        """Wait until everything that has arrived was delivered; called with the lock held."""
        self._clock.wait_for(
            self._changed, lambda: not self._busy and not self._has_events(), timeout_s
        )

    def wake(self) -> None:
        """Let the blocking thread deliver what can be delivered now; called with the lock held."""
        if self._node.with_events and not self._busy:
            self._must_block = True
            self._changed.notify_all()

    def add(self, event: DecodedEvent) -> None:
        """Queue a membership event; called with the lock held."""
        self._local.append(event)

    def close(self) -> None:
        """End :meth:`run`; called with the lock held."""
        self._closing = True
        self._changed.notify()

    def deliver_ready(self, *, once: bool = False) -> None:
        """Deliver what has arrived, without blocking; called without the lock.

        Args:
            once: whether to stop after one batch and leave the rest to a later call.
        """
        # Without the lock: the thread that has added an event sees it, and others need not.
        if not self._has_events():
            return
        with self._lock:
            if self._must_block:
                self._changed.notify()
                return
            if self._busy:
                return
            self._busy = True
        self._deliver_batches(may_block=False, once=once)

    def run(self) -> None:
        """Deliver the events that must wait, until closed; runs in a separate thread."""
        while True:
            with self._lock:
                self._clock.wait_for(
                    self._changed,
                    lambda: (
                        self._closing
                        or (self._must_block and not self._busy and self._has_events())
                    ),
                    None,
                )
                if self._closing:
                    return
                self._busy = True
            self._deliver_batches(may_block=True)

    def _deliver_batches(self, *, may_block: bool, once: bool = False) -> None:
        n_batches = 0
        batch: deque[_Item] = deque()
        try:
            while batch := self._next_batch(stop=once and n_batches > 0):
                n_batches += 1
                while batch:
                    item = batch[0]
                    event = self._decode(item) if isinstance(item, TakenEvent) else item
                    batch.popleft()
                    if event is not None and (
                        self._undelivered or not self._deliver(event, may_block)
                    ):
                        self._undelivered.append(event)
        except BaseException:
            # Whatever interrupts this thread, for example Ctrl-C, the other one delivers the rest.
            with self._lock:
                self._undelivered += batch
                self._busy, self._must_block = False, True
                self._changed.notify()
            raise

    def _next_batch(self, *, stop: bool) -> deque[_Item]:
        """Return the next events; an empty batch means that this thread is no longer busy."""
        with self._lock:
            if self._undelivered and not self._must_block:
                # An event was refused: from here on the blocking thread delivers.
                self._must_block, self._busy = True, False
                self._changed.notify()
                return deque()
            if stop:
                self._busy = False
                return deque()
            batch, self._undelivered = self._undelivered, deque()
            if self._accept is not None:
                batch += self._local
                self._local.clear()
            # Even with nothing attached, because announcements are among the events.
            n_before = self._node.subscriptions.n_announcements
            batch += self._node.take(_BATCH)
            announced = self._node.subscriptions.n_announcements != n_before
            if not batch and not announced:
                self._busy = self._must_block = False
                self._changed.notify_all()
        if self._node.unsent:
            self._on_taken()
        if announced:
            self._on_subscriptions_changed()
            return batch or self._next_batch(stop=False)
        return batch

    def _has_events(self) -> bool:
        return (
            bool(self._undelivered)
            or bool(self._node.with_events)
            or (bool(self._local) and self._accept is not None)
        )

    def _on_done(self, item: TakenEvent, handled: bool) -> None:
        if handled:
            self._on_handled(item.peer)
        else:
            with self._lock:
                self._unhandled.append(item)

    def _decode(self, item: TakenEvent) -> DecodedEvent | None:
        event = item.event
        traffic = self._traffic[base_name(event.event)]
        try:
            args, kwargs = self._codec.decode(event.skeleton, event.buffers)
        except Exception as error:
            traffic.undecodable += 1
            if isinstance(error, DecodeError | ValueError):
                _logger.error(
                    "the event %r was dropped, it cannot be decoded: %s", event.event, error
                )
            else:
                # Adapters and unpickling run the user's code.
                _logger.exception("the event %r was dropped, decoding it failed", event.event)
            if item.acknowledges:
                self._on_handled(item.peer)
            return None
        traffic.received += 1
        traffic.received_bytes += event.size
        done = partial(self._on_done, item) if item.acknowledges else None
        return DecodedEvent(event.event, tuple(args), kwargs, done)

    def _deliver(self, event: DecodedEvent, may_block: bool) -> bool:
        """Deliver one event; return False if it was refused."""
        try:
            while (accept := self._accept) is not None and not (may_block and self._closing):
                # While it waits for room, this thread is blocked, then the inbox fills, then the
                # sender waits.
                if accept(*event, may_block):
                    return True
                if not may_block:
                    return False
            handled = False
        except Exception:
            # One bad event must not stop the delivery of those after it.
            _logger.exception("the event %r was dropped, delivering it failed", event.name)
            handled = True
        if event.done is not None:
            event.done(handled)
        return True
