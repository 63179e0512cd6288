"""What waits to go to one peer: reliable events, the latest of each kind, and lossy ones."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace

from dmiddleware.router.protocol.delivery import Outbox
from dmiddleware.router.wire.envelope import WANTS_EVENT, EncodedEvent

__all__ = ["RELIABLE", "LATEST", "LOSSY", "Sending", "Outgoing"]

RELIABLE, LATEST, LOSSY = range(3)
"""The numbers of the streams."""


@dataclass(frozen=True, slots=True)
class Sending:
    """Events to send as one frame.

    Attributes:
        stream: ``RELIABLE``, ``LATEST`` or ``LOSSY``.
        sequence: the frame's number in its stream.
        events: what it carries.
        again: whether it was sent before.
    """

    stream: int
    sequence: int
    events: tuple[EncodedEvent, ...]
    again: bool = False


@dataclass(slots=True)
class OutgoingCounters:
    """What was not sent, on purpose."""

    dropped: int = 0
    superseded: int = 0


class Outgoing:
    """Everything that waits to go to one peer.

    Args:
        max_bytes: bound of what waits reliably.
        window: how many reliable frames may be unacknowledged.
        batch_bytes: small events are joined into frames of up to so many bytes.
        hold_bytes: while a frame is under way, fewer bytes of events wait for its answer.
        retry_s: when no answer comes for so long, a frame is sent again.
        max_lossy: how many lossy events wait at most; the oldest make room, counted.
    """

    def __init__(
        self,
        *,
        max_bytes: int,
        window: int,
        batch_bytes: int = 1 << 18,
        hold_bytes: int = 0,
        retry_s: float = 2.0,
        max_lossy: int = 1024,
    ) -> None:
        self.outbox: Outbox[EncodedEvent] = Outbox(
            max_bytes=max_bytes,
            window=window,
            batch_bytes=batch_bytes,
            hold_bytes=hold_bytes,
            retry_s=retry_s,
        )
        self.counters = OutgoingCounters()
        self._retry_s = retry_s
        self._latest: dict[str, EncodedEvent] = {}
        self._lossy: deque[EncodedEvent] = deque()
        self._max_lossy = max_lossy
        self._batch_bytes = batch_bytes
        self._sequences = {LATEST: 0, LOSSY: 0}
        self._latest_under_way: Sending | None = None
        self._latest_again_at = 0.0

    @property
    def empty(self) -> bool:
        """Whether nothing waits that must or should arrive."""
        return self.outbox.empty and not self._latest and self._latest_under_way is None

    @property
    def undelivered(self) -> int:
        """How many accepted reliable events have not been acknowledged."""
        # What nodes tell each other of themselves is no one's loss.
        return sum(event.event != WANTS_EVENT for event in self.outbox.unacknowledged())

    def offer(self, event: EncodedEvent) -> bool:
        """Accept a reliable event, unless the outbox is full: then the emitter waits."""
        return self.outbox.offer(event)

    def push(self, event: EncodedEvent) -> None:
        """Take a reliable event that nobody may wait for."""
        self.outbox.push(event)

    def give_up(self) -> int:
        """Drop all that waits; return how many accepted reliable events are lost by it."""
        self._latest.clear()
        self._latest_under_way = None
        self._lossy.clear()
        lost = self.undelivered
        self.outbox.give_up()
        return lost

    def put_latest(self, event: EncodedEvent) -> None:
        """Take an event that makes all earlier ones of its name worthless."""
        if event.event in self._latest:
            self.counters.superseded += 1
        self._latest[event.event] = event
        under_way = self._latest_under_way
        if under_way is not None:
            # It would not be sent again, so it is not kept: a slow reader costs no copy of its own.
            kept = tuple(old for old in under_way.events if old.event != event.event)
            self._latest_under_way = replace(under_way, events=kept)

    def put_lossy(self, event: EncodedEvent) -> None:
        """Take an event that may be dropped."""
        if len(self._lossy) >= self._max_lossy:
            self._lossy.popleft()
            self.counters.dropped += 1
        self._lossy.append(event)

    def next_sending(self, now: float) -> Sending | None:
        """Return what to send now: the latest first (it is awaited), then reliable, then lossy."""
        return self._next_latest(now) or self._next_reliable(now) or self._next_lossy()

    def next_time(self) -> float | None:
        """Return when :meth:`next_sending` may have something without further input."""
        times = [self.outbox.next_time()]
        if self._latest_under_way is not None:
            times.append(self._latest_again_at)
        return min((time for time in times if time is not None), default=None)

    def on_ack(self, stream: int, sequence: int, credit: int) -> None:
        """Take an acknowledgement of a frame."""
        if stream == RELIABLE:
            self.outbox.on_ack(sequence, credit)
        elif stream == LATEST:
            under_way = self._latest_under_way
            if under_way is not None and sequence >= under_way.sequence:
                self._latest_under_way = None

    def on_busy(self, stream: int, sequence: int, delay_s: float, now: float) -> None:
        """Take the peer's word that it is full."""
        if stream == RELIABLE:
            self.outbox.on_busy(sequence, delay_s, now)

    def on_failed(self, sending: Sending, now: float) -> None:
        """Take note that a sending came to nothing; lossy events in it are counted as dropped."""
        if sending.stream == RELIABLE:
            self.outbox.on_failed(sending.sequence, now)
        elif sending.stream == LATEST:
            self._latest_again_at = min(self._latest_again_at, now)
        else:
            self.counters.dropped += len(sending.events)

    def on_reconnect(self, now: float) -> None:
        """Begin a new connection to the same process."""
        self.outbox.on_reconnect(now)
        self._latest_again_at = now

    def on_new_peer(self) -> None:
        """Begin anew with another process under the same node id."""
        self.outbox.on_new_peer()
        if self._latest_under_way is not None:
            for event in self._latest_under_way.events:
                self._latest.setdefault(event.event, event)
        self._latest_under_way = None
        self._sequences = {LATEST: 0, LOSSY: 0}

    def _next_latest(self, now: float) -> Sending | None:
        under_way = self._latest_under_way
        if under_way is not None:
            if self._latest_again_at > now:
                return None
            # No answer came: whatever is newer by now replaces what was sent.
            newest = {event.event: event for event in under_way.events} | self._latest
            again = True
        else:
            newest, again = self._latest, False
        if not newest:
            return None
        events = self._first_of(newest)
        self._latest = {name: newest[name] for name in list(newest)[len(events) :]}
        self._sequences[LATEST] += 1
        sending = Sending(LATEST, self._sequences[LATEST], events, again)
        self._latest_under_way = sending
        self._latest_again_at = now + self._retry_s
        return sending

    def _first_of(self, newest: dict[str, EncodedEvent]) -> tuple[EncodedEvent, ...]:
        """Return the first event, and those after it that fit into a frame with it."""
        size, count = 0, 0
        for event in newest.values():
            size += event.size
            if count and size > self._batch_bytes:
                break
            count += 1
        return tuple(newest.values())[:count]

    def _next_reliable(self, now: float) -> Sending | None:
        frame = self.outbox.next_frame(now)
        if frame is None:
            return None
        return Sending(RELIABLE, frame.sequence, frame.messages, again=frame.attempts > 1)

    def _next_lossy(self) -> Sending | None:
        if not self._lossy:
            return None
        events = [self._lossy.popleft()]
        size = events[0].size
        while self._lossy and size + self._lossy[0].size <= self._batch_bytes:
            events.append(self._lossy.popleft())
            size += events[-1].size
        self._sequences[LOSSY] += 1
        return Sending(LOSSY, self._sequences[LOSSY], tuple(events))
