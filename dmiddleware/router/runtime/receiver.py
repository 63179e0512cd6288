"""Receiving: delivers the peers' events to the task, in order, on whichever thread has them."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, NamedTuple, TypeAlias

from dmiddleware.errors import DecodeError, EventQueueFull
from dmiddleware.pipeline import Clock
from dmiddleware.router.protocol.counters import TrafficCounters
from dmiddleware.router.protocol.node import NodeProtocol
from dmiddleware.router.protocol.session import PeerSession
from dmiddleware.router.wire.codec import Codec
from dmiddleware.router.wire.envelope import EncodedEvent

__all__ = ["DecodedEvent", "Deliver", "Offer", "Receiver"]

_logger = logging.getLogger(__name__)

Deliver: TypeAlias = Callable[..., None]
"""Takes an event's name and arguments. It may block; on EventQueueFull it is called again."""

Offer: TypeAlias = Callable[..., bool]
"""Takes an event without blocking, or returns False if it is out of room."""

Done: TypeAlias = Callable[[bool], None]
"""Called when an event was handled, or with False if it never will be by this program."""

DecodedEvent: TypeAlias = (
    tuple[str, tuple[Any, ...], dict[str, Any]] | tuple[str, tuple[Any, ...], dict[str, Any], Done]
)
"""An event's name and arguments; with the function to call when it was handled, if any."""


class _ToConfirm(NamedTuple):
    """An event that is acknowledged when it has been handled."""

    peer: PeerSession
    event: EncodedEvent


_Item: TypeAlias = DecodedEvent | EncodedEvent | _ToConfirm

_BATCH: Final = 256


class Receiver:
    """Delivers events one at a time and in order.

    With an :data:`Offer`, the thread that received an event delivers it and wakes no other thread.
    Once an event is refused, it and all that follow are left to a thread that may block.

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
        on_handled: Callable[[PeerSession], None],
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
        self._unhandled: list[_Item] = []
        self._deliver: Deliver | None = None
        self._offer: Offer | None = None
        self._confirms = False
        # One thread at a time delivers; the blocking one continues until nothing is left.
        self._busy = False
        self._must_block = False
        self._closing = False

    def attach(self, deliver: Deliver, offer: Offer | None, *, confirms: bool = False) -> None:
        """Deliver events to these functions from now on.

        Args:
            deliver: takes an event; may block.
            offer: takes an event without blocking; None: there is no such function.
            confirms: whether both take a :data:`Done` too, if the event has one.
        """
        with self._lock:
            self._deliver, self._offer, self._confirms = deliver, offer, confirms
            # The program before this one has not handled them.
            self._undelivered.extendleft(reversed(self._unhandled))
            self._unhandled.clear()
            self._must_block = offer is None
            self._changed.notify()
        self.deliver_ready()

    @property
    def attached(self) -> bool:
        """Whether there is a function to deliver events to."""
        return self._deliver is not None

    def wait_until_delivered(self, timeout_s: float) -> None:
        """Wait until everything that has arrived was delivered; called with the lock held."""
        self._clock.wait_for(
            self._changed, lambda: not self._busy and not self._has_events(), timeout_s
        )

    def wake(self) -> None:
        """Let the blocking thread deliver what can be delivered now; called with the lock held."""
        if self._node.has_events and not self._busy:
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
            if not self._has_events():
                return
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
                    event: DecodedEvent | None
                    if isinstance(item, EncodedEvent):
                        event = self._decode(item)
                    elif isinstance(item, _ToConfirm):
                        event = self._decode_to_confirm(item)
                    else:
                        event = item
                    batch.popleft()
                    if event is not None and (
                        self._undelivered or not self._deliver_one(event, may_block)
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
            batch = self._undelivered.copy()
            self._undelivered.clear()
            if self._deliver is not None:
                batch += self._local
                self._local.clear()
            # Even with nothing attached, because announcements are among the events.
            n_before = self._node.subscriptions.n_announcements
            batch += [_ToConfirm(*item) for item in self._node.take_handled(_BATCH)]
            batch += [event for _, event in self._node.take(_BATCH)]
            announced = self._node.subscriptions.n_announcements != n_before
            if not batch and not announced:
                self._busy, self._must_block = False, self._offer is None
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
            or self._node.has_events
            or (bool(self._local) and self._deliver is not None)
        )

    def _decode_to_confirm(self, item: _ToConfirm) -> DecodedEvent | None:
        event = self._decode(item.event)
        if event is None:
            self._on_handled(item.peer)
            return None
        return event[0], event[1], event[2], partial(self._on_done, item)

    def _on_done(self, item: _ToConfirm, handled: bool) -> None:
        if handled:
            self._on_handled(item.peer)
        else:
            with self._lock:
                self._unhandled.append(item)

    def _decode(self, event: EncodedEvent) -> DecodedEvent | None:
        traffic = self._traffic.of(event.event)
        try:
            args, kwargs = self._codec.decode(event.skeleton, event.buffers)
        except (DecodeError, ValueError) as error:
            traffic.undecodable += 1
            _logger.error("the event %r was dropped, it cannot be decoded: %s", event.event, error)
            return None
        except Exception:
            # Adapters and unpickling run the user's code.
            traffic.undecodable += 1
            _logger.exception("the event %r was dropped, decoding it failed", event.event)
            return None
        traffic.received += 1
        traffic.received_bytes += event.size
        return event.event, tuple(args), kwargs

    def _deliver_one(self, event: DecodedEvent, may_block: bool) -> bool:
        """Deliver one event; return False if it was refused."""
        if len(event) == 4:
            return self._deliver_to_confirm(event, may_block)
        try:
            return self._pass_on(event, may_block) is not False
        except Exception:
            # One bad event must not stop the delivery of those after it.
            _logger.exception("the event %r was dropped, delivering it failed", event[0])
        return True

    def _deliver_to_confirm(
        self, event: tuple[str, tuple[Any, ...], dict[str, Any], Done], may_block: bool
    ) -> bool:
        *call, done = event
        try:
            taken = self._pass_on(event if self._confirms else call, may_block)
        except Exception:
            _logger.exception("the handler of the event %r failed", event[0])
            done(True)
            return True
        if taken is None:
            done(False)
        elif taken and not self._confirms:
            done(True)
        return taken is not False

    def _pass_on(self, event: Sequence[Any], may_block: bool) -> bool | None:
        """Return whether the program took the event; None without a program."""
        if not may_block:
            return None if self._offer is None else self._offer(*event)
        while self._deliver is not None and not self._closing:
            # A full queue blocks this thread, then the inbox fills, then the sender waits.
            with contextlib.suppress(EventQueueFull):
                self._deliver(*event)
                return True
        return None
