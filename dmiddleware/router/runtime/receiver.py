"""Hands what came from the peers to the task, in order, on whichever thread finds it."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Final, TypeAlias

from dmiddleware.errors import DecodeError, EventQueueFull
from dmiddleware.pipeline import Clock
from dmiddleware.router.protocol.counters import Traffic
from dmiddleware.router.protocol.node import Node
from dmiddleware.router.wire.codec import Codec
from dmiddleware.router.wire.envelope import EncodedEvent, decode_event

__all__ = ["Deliver", "Dispatcher", "News", "Offer"]

_logger = logging.getLogger(__name__)

Deliver: TypeAlias = Callable[[str, tuple[Any, ...], dict[str, Any]], None]
"""Takes an event, and may wait for room; or raises EventQueueFull, and gets it again."""

Offer: TypeAlias = Callable[[str, tuple[Any, ...], dict[str, Any]], bool]
"""Takes an event if there is room for it now; it does not wait."""

News: TypeAlias = tuple[str, tuple[Any, ...], dict[str, Any]]
"""An event that the router itself has made."""

_TAKE: Final = 256


class Dispatcher:
    """Hands events over, one at a time and in order.

    With an :data:`Offer` this is done by the thread that received them, which wakes no other; what
    is refused, and all that comes meanwhile, is left to a thread that may wait.

    Args:
        node: has the mail.
        lock: guards the node.
        codec: decodes events.
        traffic: counts them.
        clock: waits.
        on_wants: called, without the lock, when a peer has said what it subscribes to.
    """

    def __init__(
        self,
        node: Node,
        lock: threading.RLock,
        *,
        codec: Codec,
        traffic: Traffic,
        clock: Clock,
        on_wants: Callable[[], None],
    ) -> None:
        self._node = node
        self._lock = lock
        self._codec = codec
        self._traffic = traffic
        self._clock = clock
        self._on_wants = on_wants
        self._came = threading.Condition(lock)
        self._news: deque[News] = deque()
        self._left: deque[News | EncodedEvent] = deque()
        self._deliver: Deliver | None = None
        self._offer: Offer | None = None
        # One thread at a time hands over; the waiting one goes on until nothing is left.
        self._busy = False
        self._must_wait = False
        self._closing = False

    def attach(self, deliver: Deliver, offer: Offer | None) -> None:
        """Hand events to these from now on."""
        with self._lock:
            self._deliver, self._offer = deliver, offer
            self._must_wait = offer is None
            self._came.notify()
        self.hand_over()

    def add(self, news: News) -> None:
        """Take an event of the router itself; called with the lock held."""
        self._news.append(news)

    def close(self) -> None:
        """End :meth:`run`; called with the lock held."""
        self._closing = True
        self._came.notify()

    def hand_over(self, *, once: bool = False) -> None:
        """Hand over what there is, without waiting; called without the lock.

        Args:
            once: not more than is taken at once, and leave the rest to a later call.
        """
        with self._lock:
            if not self._has_mail():
                return
            if self._must_wait:
                self._came.notify()
                return
            if self._busy:
                return
            self._busy = True
        self._hand_over(self._offered, once=once)

    def run(self) -> None:
        """Hand over what must wait, until closed; a thread of its own."""
        while True:
            with self._lock:
                self._clock.wait_for(
                    self._came,
                    lambda: (
                        self._closing or (self._must_wait and not self._busy and self._has_mail())
                    ),
                    None,
                )
                if self._closing:
                    return
                self._busy = True
            self._hand_over(self._delivered)

    def _hand_over(self, take: Offer, *, once: bool = False) -> None:
        turns = 0
        batch: deque[News | EncodedEvent] = deque()
        try:
            while batch := self._next_batch(ends=once and turns > 0):
                turns += 1
                while batch:
                    item = batch[0]
                    news = self._decode(item) if isinstance(item, EncodedEvent) else item
                    batch.popleft()
                    if news is not None and (self._left or not self._give(take, news)):
                        self._left.append(news)
        except BaseException:
            # Whatever ends this thread's turn, Ctrl-C say, the other one has the rest.
            with self._lock:
                self._left += batch
                self._busy, self._must_wait = False, True
                self._came.notify()
            raise

    def _next_batch(self, *, ends: bool = False) -> deque[News | EncodedEvent]:
        """Return what to hand over next; nothing ends this thread's turn, as does ``ends``."""
        with self._lock:
            waits = self._offer is None
            if self._left and not self._must_wait:
                # Refused: from here on it is the business of who may wait.
                self._must_wait, self._busy = True, False
                self._came.notify()
                return deque()
            if ends:
                self._busy = False
                return deque()
            batch = self._left.copy()
            self._left.clear()
            if self._deliver is not None:
                batch += self._news
                self._news.clear()
            # Taken even with no one attached: peers say in their mail what they want.
            n_told = self._node.audience.n_told
            batch += [event for _, event in self._node.take(_TAKE)]
            told = self._node.audience.n_told != n_told
            if not batch and not told:
                self._busy, self._must_wait = False, waits
        if told:
            self._on_wants()
            return batch or self._next_batch()
        return batch

    def _has_mail(self) -> bool:
        return (
            bool(self._left)
            or self._node.has_mail
            or (bool(self._news) and self._deliver is not None)
        )

    def _decode(self, event: EncodedEvent) -> News | None:
        traffic = self._traffic.of(event.event)
        try:
            args, kwargs = decode_event(event, self._codec)
        except (DecodeError, ValueError) as error:
            traffic.undecodable += 1
            _logger.error("the event %r could not be decoded: %s", event.event, error)
            return None
        except Exception:
            # Adapters and unpickling are foreign code.
            traffic.undecodable += 1
            _logger.exception("the event %r could not be decoded", event.event)
            return None
        traffic.received += 1
        traffic.received_bytes += event.size
        return event.event, tuple(args), kwargs

    @staticmethod
    def _give(take: Offer, news: News) -> bool:
        """Hand one event over; tell whether it is done with."""
        try:
            return take(*news)
        except Exception:
            # One event that its taker cannot stand must not end all that come after it.
            _logger.exception("the event %r was not taken", news[0])
            return True

    def _offered(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        return self._offer is None or self._offer(name, args, kwargs)

    def _delivered(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        while self._deliver is not None and not self._closing:
            # A full queue here makes this thread wait, then the inbox fill, then the sender wait.
            with contextlib.suppress(EventQueueFull):
                self._deliver(name, args, kwargs)
                break
        return True
