"""The event streams between two nodes: reliable, latest and lossy, in both directions.

Reliable events arrive once, in order and whole, within bounded memory. :class:`Outbox` numbers
frames, keeps each until it is acknowledged, and sends it again under the same number if no
acknowledgment arrives. :class:`Inbox` accepts each number once, restores the order, and makes the
sender wait when it is full. Frames are acknowledged in order: an acknowledgment covers all frames
up to its number. A frame that arrives early is only *kept*: the sender does not send it to this
process again, but it does to a process that replaces it.

There are two such streams. In one, an acknowledgment means *accepted into the inbox*; in the
other, that all events of the frame have been *handled*.

:class:`OutgoingStreams` and :class:`IncomingStreams` add two more: of ``latest`` events only the
newest of each name is sent, and ``lossy`` events are dropped, and counted, when too many are
waiting.

One pair serves one direction between two nodes. It outlives connections and ends with the
incarnation of either node.
"""

from __future__ import annotations

import enum
import math
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Final, Generic, Protocol, TypeVar

import msgspec

from dmiddleware.errors import FrameError
from dmiddleware.event_names import base_name
from dmiddleware.router.protocol.fragments import Assembly, Fragment, Transfer
from dmiddleware.router.wire.envelope import SUBSCRIPTIONS_EVENT, EncodedEvent
from dmiddleware.router.wire.frame import MAX_BUFFERS

__all__ = [
    "RELIABLE",
    "LATEST",
    "LOSSY",
    "HANDLED",
    "EventBatch",
    "IncomingStreams",
    "Inbox",
    "Message",
    "Outbox",
    "OutgoingStreams",
    "PendingFrame",
    "Verdict",
]

RELIABLE, LATEST, LOSSY, HANDLED = range(4)
"""The stream numbers on the wire; ``HANDLED`` is reliable, and acknowledged after the handlers."""

MAX_UNHANDLED: Final = 64
"""How many events that are acknowledged when handled may wait for their handlers.

More of them stay in the inbox, so that they do not delay other events.
"""

HANDLED_BATCH_BYTES: Final = 1 << 14
"""Largest frame of small events that are acknowledged when handled.

A frame is acknowledged as a whole, so a successor handles up to this much again.
"""


class Message(Protocol):
    """An encoded message."""

    @property
    def size(self) -> int:
        """Number of bytes that count against the bounds."""


T = TypeVar("T", bound=Message)


@dataclass(slots=True)
class PendingFrame(Generic[T]):
    """A frame that has been sent and not yet acknowledged.

    Attributes:
        sequence: its number, from 1.
        messages: its messages, in order.
        size: total bytes of the messages.
        attempts: how often it has been sent.
        not_before: earliest time of the next attempt, in seconds.
        kept: whether the receiver has it, although it has not acknowledged it.
        in_fragments: whether it is sent in fragments, and so never again as a whole.
    """

    sequence: int
    messages: tuple[T, ...]
    size: int
    attempts: int = 0
    not_before: float = 0.0
    kept: bool = False
    in_fragments: bool = False


@dataclass(slots=True)
class OutboxCounters:
    """Counters of an outbox."""

    accepted: int = 0
    acknowledged: int = 0
    sent_frames: int = 0
    retried_frames: int = 0
    refused_frames: int = 0


class Outbox(Generic[T]):
    """The sender's side of the reliable stream.

    Args:
        max_bytes: how many bytes may wait here; beyond that :meth:`offer` refuses. An empty outbox
            accepts one message of any size.
        window: how many frames may be unacknowledged.
        batch_bytes: small messages are joined into frames of up to this size.
        hold_bytes: while a frame is unacknowledged, messages are held back until this many bytes
            are waiting. This fills frames under load and adds little latency otherwise.
        retry_s: seconds after which an unacknowledged frame is sent again.
    """

    def __init__(
        self,
        *,
        max_bytes: int,
        window: int = 8,
        batch_bytes: int = 1 << 18,
        hold_bytes: int = 0,
        retry_s: float = 2.0,
    ) -> None:
        if max_bytes < 1 or window < 1 or batch_bytes < 1:
            raise ValueError(
                f"max_bytes, window and batch_bytes must be at least 1, got {max_bytes}, {window} "
                f"and {batch_bytes}"
            )
        self._max_bytes = max_bytes
        self._window = window
        self._batch_bytes = batch_bytes
        self._hold_bytes = hold_bytes
        self._retry_s = retry_s
        self._waiting: deque[T] = deque()
        self._waiting_bytes = 0
        self._pending: OrderedDict[int, PendingFrame[T]] = OrderedDict()
        self._next_sequence = 1
        self._bytes = 0
        self._credit = 2**63
        self.counters = OutboxCounters()

    @property
    def n_bytes(self) -> int:
        """Bytes that are accepted and not yet acknowledged."""
        return self._bytes

    @property
    def n_messages(self) -> int:
        """Messages that are accepted and not yet acknowledged."""
        return len(self._waiting) + sum(len(frame.messages) for frame in self._pending.values())

    @property
    def empty(self) -> bool:
        """Whether everything accepted has been acknowledged."""
        return not self._waiting and not self._pending

    def offer(self, message: T) -> bool:
        """Accept a message, or return False if the outbox is full; the caller then retries."""
        if self._bytes and self._bytes + message.size > self._max_bytes:
            return False
        self.push(message)
        return True

    def push(self, message: T) -> None:
        """Accept a message even if the outbox is full; for control messages that cannot wait."""
        self._waiting.append(message)
        self._waiting_bytes += message.size
        self._bytes += message.size
        self.counters.accepted += 1

    def next_frame(self, now: float) -> PendingFrame[T] | None:
        """Return a frame to send now, or None.

        Frames that are due for another attempt come first, then waiting messages, joined, as far
        as the window and the receiver's credit allow.
        """
        for frame in self._pending.values():
            if frame.not_before <= now:
                self.counters.retried_frames += 1
                return self._sent(frame, now)
        packed = self._pack()
        return None if packed is None else self._sent(packed, now)

    def next_time(self) -> float | None:
        """Return when :meth:`next_frame` has something without further input; None: never."""
        due_at: float | None = None
        for frame in self._pending.values():
            if (
                not frame.kept
                and not frame.in_fragments
                and (due_at is None or frame.not_before < due_at)
            ):
                due_at = frame.not_before
        return due_at

    def on_ack(self, sequence: int, credit: int) -> None:
        """Process an acknowledgment.

        Args:
            sequence: the newest frame that is acknowledged, with all before it.
            credit: how many more bytes the receiver accepts.
        """
        self._credit = credit
        while self._pending and next(iter(self._pending)) <= sequence:
            _, frame = self._pending.popitem(last=False)
            self._bytes -= frame.size
            self.counters.acknowledged += len(frame.messages)

    def on_kept(self, sequence: int) -> None:
        """Note that the receiver has a frame, and will acknowledge it later."""
        frame = self._pending.get(sequence)
        if frame is not None:
            frame.kept, frame.not_before = True, math.inf

    def on_fragments(self, sequence: int) -> None:
        """Note that a frame is sent in fragments from now on, until it is acknowledged."""
        frame = self._pending[sequence]
        frame.in_fragments, frame.not_before = True, math.inf

    def on_busy(self, sequence: int, delay_s: float, now: float) -> None:
        """Note that the receiver is full; the frame is sent again after ``delay_s`` seconds."""
        frame = self._pending.get(sequence)
        if frame is not None and not frame.kept:
            self.counters.refused_frames += 1
            if not frame.in_fragments:
                frame.not_before = now + delay_s

    def on_failed(self, sequence: int, now: float) -> None:
        """Note that a send failed; the frame may be sent again at once."""
        frame = self._pending.get(sequence)
        if frame is not None and not frame.kept and not frame.in_fragments:
            frame.not_before = now

    def on_reconnect(self, now: float) -> None:
        """Start a new connection to the same incarnation: send pending frames again."""
        self._credit = 2**63
        for frame in self._pending.values():
            if not frame.kept and not frame.in_fragments:
                frame.not_before = now

    def on_new_peer(self) -> None:
        """Start over with a new incarnation of the peer.

        Messages that the old one had not acknowledged are numbered from 1 again. Messages that it
        had acknowledged are lost with it.
        """
        messages = [m for frame in self._pending.values() for m in frame.messages]
        self._waiting.extendleft(reversed(messages))
        self._waiting_bytes = self._bytes
        self._pending.clear()
        self._next_sequence = 1
        self._credit = 2**63

    def give_up(self) -> None:
        """Drop everything that was not acknowledged.

        Pending frames are emptied but keep their numbers, so that a peer that reconnects after all
        sees no gap in the sequence.
        """
        self._waiting.clear()
        self._waiting_bytes = 0
        for frame in self._pending.values():
            frame.messages, frame.size = (), 0
            if frame.in_fragments:
                frame.in_fragments, frame.not_before = False, 0.0
        self._bytes = 0

    def unacknowledged(self) -> list[T]:
        """Return, in order, the messages that would be lost if the outbox were dropped now."""
        pending = [m for frame in self._pending.values() for m in frame.messages]
        return pending + list(self._waiting)

    def _pack(self) -> PendingFrame[T] | None:
        if not self._waiting or not self._window_open():
            return None
        if self._waiting_bytes < self._hold_bytes and self._is_in_flight():
            return None
        if self._pending and self._credit < self._waiting[0].size:
            # With nothing pending, a frame is sent regardless: its BUSY or ACK brings new credit.
            return None
        messages = [self._waiting.popleft()]
        size = messages[0].size
        limit = min(self._batch_bytes, self._credit)
        while self._waiting and size + self._waiting[0].size <= limit:
            message = self._waiting.popleft()
            messages.append(message)
            size += message.size
        self._waiting_bytes -= size
        frame = PendingFrame(self._next_sequence, tuple(messages), size)
        self._next_sequence += 1
        self._credit -= size
        self._pending[frame.sequence] = frame
        return frame

    def _is_in_flight(self) -> bool:
        """Whether the newest frame has not reached the receiver yet, as far as is known."""
        return bool(self._pending) and not self._pending[self._next_sequence - 1].kept

    def _window_open(self) -> bool:
        # The window starts at the oldest unacknowledged frame, as the receiver counts it.
        oldest = next(iter(self._pending), self._next_sequence)
        return self._next_sequence < oldest + self._window

    def _sent(self, frame: PendingFrame[T], now: float) -> PendingFrame[T]:
        frame.attempts += 1
        frame.not_before = now + self._retry_s
        self.counters.sent_frames += 1
        return frame


class EventBatch(msgspec.Struct, frozen=True):
    """Events that are sent as one frame.

    Attributes:
        stream: ``RELIABLE``, ``LATEST``, ``LOSSY`` or ``HANDLED``.
        sequence: the frame's number in its stream.
        events: the events, in order.
        is_retry: whether it has been sent before.
        fragment: the only part of the frame that is sent; None: all of it.
    """

    stream: int
    sequence: int
    events: tuple[EncodedEvent, ...]
    is_retry: bool = False
    fragment: Fragment | None = None


@dataclass(slots=True)
class OutgoingCounters:
    """Events that were left out on purpose."""

    dropped: int = 0
    superseded: int = 0


class OutgoingStreams:
    """The streams to one peer.

    Args:
        max_bytes: bound of each of the two reliable streams.
        window: how many frames of each of them may be unacknowledged.
        batch_bytes: small events are joined into frames of up to this size.
        hold_bytes: see :class:`Outbox`.
        retry_s: seconds after which an unacknowledged frame is sent again.
        max_lossy: how many lossy events may wait; beyond that the oldest are dropped and counted.
        fragment_bytes: the size of fragments.
        largest_whole_bytes: larger events are sent in fragments.

    Attributes:
        outbox: the reliable stream that is acknowledged when accepted.
        outbox_handled: the one that is acknowledged when handled.
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
        fragment_bytes: int = 4 << 20,
        largest_whole_bytes: int = 16 << 20,
    ) -> None:
        self.outbox, self.outbox_handled = (
            Outbox[EncodedEvent](
                max_bytes=max_bytes,
                window=window,
                batch_bytes=bytes_each,
                hold_bytes=min(hold_bytes, bytes_each),
                retry_s=retry_s,
            )
            for bytes_each in (batch_bytes, min(batch_bytes, HANDLED_BATCH_BYTES))
        )
        self._outboxes = {RELIABLE: self.outbox, HANDLED: self.outbox_handled}
        self.counters = OutgoingCounters()
        self._retry_s = retry_s
        self._latest: dict[str, EncodedEvent] = {}
        self._lossy: deque[EncodedEvent] = deque()
        self._max_lossy = max_lossy
        self._batch_bytes = batch_bytes
        self._sequences = {LATEST: 0, LOSSY: 0}
        self._pending_latest: EventBatch | None = None
        self._latest_retry_at = 0.0
        self._fragment_bytes = fragment_bytes
        self._largest_whole_bytes = largest_whole_bytes
        # The frames of each stream that are sent in fragments, by sequence; the oldest one is
        # under way, so that a later one never takes the memory that it needs.
        self._transfers: dict[int, dict[int, tuple[EventBatch, Transfer]]] = {}
        self._sent_fragment = False

    @property
    def empty(self) -> bool:
        """Whether no reliable or latest event is waiting or unacknowledged."""
        is_sent = self.outbox.empty and self.outbox_handled.empty
        return is_sent and not self._latest and self._pending_latest is None

    @property
    def n_messages(self) -> int:
        """How many reliable events have not been acknowledged."""
        return self.outbox.n_messages + self.outbox_handled.n_messages

    @property
    def n_bytes(self) -> int:
        """How many bytes they have."""
        return self.outbox.n_bytes + self.outbox_handled.n_bytes

    @property
    def undelivered(self) -> Counter[str]:
        """How many accepted reliable events have not been acknowledged, by name."""
        events = self.outbox.unacknowledged() + self.outbox_handled.unacknowledged()
        counts = Counter(event.event for event in events)
        # The nodes' own control events are not counted as losses.
        del counts[SUBSCRIPTIONS_EVENT]
        return counts

    def give_up(self) -> Counter[str]:
        """Drop all waiting events; return the lost reliable ones, as :attr:`undelivered`."""
        self._latest.clear()
        self._pending_latest = None
        self._lossy.clear()
        self._transfers.clear()
        lost = self.undelivered
        for outbox in self._outboxes.values():
            outbox.give_up()
        return lost

    def put_latest(self, event: EncodedEvent) -> None:
        """Queue an event that supersedes all earlier ones of its name."""
        if event.event in self._latest:
            self.counters.superseded += 1
        self._latest[event.event] = event
        pending = self._pending_latest
        if pending is not None and LATEST not in self._transfers:
            # The old version will not be sent again, so a slow reader must not keep it in memory.
            kept = tuple(old for old in pending.events if old.event != event.event)
            self._pending_latest = msgspec.structs.replace(pending, events=kept)

    def put_lossy(self, event: EncodedEvent) -> None:
        """Queue an event that may be dropped."""
        if len(self._lossy) >= self._max_lossy:
            self._lossy.popleft()
            self.counters.dropped += 1
        self._lossy.append(event)

    def next_batch(self, now: float) -> EventBatch | None:
        """Return what to send now: latest events first, then reliable, then lossy ones.

        Fragments of large events take turns with all others.
        """
        batch = self._next_fragment(now) if self._transfers and not self._sent_fragment else None
        batch = batch or self._next_whole(now) or self._next_fragment(now)
        self._sent_fragment = batch is not None and batch.fragment is not None
        return batch

    def _next_whole(self, now: float) -> EventBatch | None:
        return (
            self._next_latest(now)
            or self._next_reliable(RELIABLE, now)
            or self._next_reliable(HANDLED, now)
            or self._next_lossy()
        )

    def next_time(self) -> float | None:
        """Return when :meth:`next_batch` has something without further input; None: never."""
        due_at = self._next_whole_time()
        for transfers in self._transfers.values():
            _, transfer = next(iter(transfers.values()))
            due_at = transfer.due_at if due_at is None else min(due_at, transfer.due_at)
        return due_at

    def _next_whole_time(self) -> float | None:
        due_at = self.outbox.next_time()
        if not self.outbox_handled.empty:
            times = (due_at, self.outbox_handled.next_time())
            due_at = min((time for time in times if time is not None), default=None)
        if (
            self._pending_latest is None
            or LATEST in self._transfers
            or (due_at is not None and due_at < self._latest_retry_at)
        ):
            return due_at
        return self._latest_retry_at

    def on_ack(self, stream: int, sequence: int, credit: int) -> None:
        """Process the acknowledgment of a frame."""
        for number in [one for one in self._transfers.get(stream, ()) if one <= sequence]:
            self._end_transfer(stream, number)
        if (outbox := self._outboxes.get(stream)) is not None:
            outbox.on_ack(sequence, credit)
        elif stream == LATEST:
            pending = self._pending_latest
            if pending is not None and sequence >= pending.sequence:
                self._pending_latest = None

    def on_kept(self, stream: int, sequence: int) -> None:
        """Note that the peer has a frame, and will acknowledge it later."""
        self._end_transfer(stream, sequence)
        if (outbox := self._outboxes.get(stream)) is not None:
            outbox.on_kept(sequence)

    def on_progress(self, stream: int, sequence: int, offset: int) -> None:
        """Note that the peer has the bytes of a frame in fragments before ``offset``.

        Raises:
            FrameError: if the offset lies outside the frame.
        """
        if (transfer := self._transfer(stream, sequence)) is not None:
            transfer.on_progress(offset)

    def on_busy(self, stream: int, sequence: int, delay_s: float, now: float) -> None:
        """Note that the peer is full."""
        if (transfer := self._transfer(stream, sequence)) is not None:
            transfer.ask_at(now + delay_s)
        if (outbox := self._outboxes.get(stream)) is not None:
            outbox.on_busy(sequence, delay_s, now)

    def on_failed(self, batch: EventBatch, now: float) -> None:
        """Note that a send failed; its lossy events count as dropped."""
        if (transfer := self._transfer(batch.stream, batch.sequence)) is not None:
            transfer.ask_at(now)
        if (outbox := self._outboxes.get(batch.stream)) is not None:
            outbox.on_failed(batch.sequence, now)
        elif batch.stream == LATEST:
            self._latest_retry_at = min(self._latest_retry_at, now)
        elif transfer is not None or batch.fragment is None:
            self._end_transfer(LOSSY, batch.sequence)
            self.counters.dropped += len(batch.events)

    def on_reconnect(self, now: float) -> None:
        """Start a new connection to the same process."""
        self._drop_lossy_transfer()
        for transfers in self._transfers.values():
            for _, transfer in transfers.values():
                transfer.ask_at(now)
        for outbox in self._outboxes.values():
            outbox.on_reconnect(now)
        self._latest_retry_at = now

    def on_new_peer(self) -> None:
        """Start over with another process under the same node id."""
        self._drop_lossy_transfer()
        self._transfers.clear()
        for outbox in self._outboxes.values():
            outbox.on_new_peer()
        if self._pending_latest is not None:
            for event in self._pending_latest.events:
                self._latest.setdefault(event.event, event)
        self._pending_latest = None
        self._sequences = {LATEST: 0, LOSSY: 0}

    def _next_fragment(self, now: float) -> EventBatch | None:
        for stream, transfers in self._transfers.items():
            batch, transfer = next(iter(transfers.values()))
            fragment = transfer.next_fragment(now)
            if fragment is not None:
                # The next one is of another stream, if there is any.
                self._transfers[stream] = self._transfers.pop(stream)
                return msgspec.structs.replace(batch, fragment=fragment)
        return None

    def _in_fragments(self, batch: EventBatch) -> bool:
        """Return whether a frame has to be sent in fragments; if so, start that."""
        if len(batch.events) != 1 or not self._is_large(batch.events[0]):
            return False
        transfer = Transfer(
            batch.events[0], fragment_bytes=self._fragment_bytes, retry_s=self._retry_s
        )
        self._transfers.setdefault(batch.stream, {})[batch.sequence] = batch, transfer
        return True

    def _is_large(self, event: EncodedEvent) -> bool:
        return event.size > self._largest_whole_bytes or len(event.buffers) >= MAX_BUFFERS

    def _transfer(self, stream: int, sequence: int) -> Transfer | None:
        _, transfer = self._transfers.get(stream, {}).get(sequence, (None, None))
        return transfer

    def _end_transfer(self, stream: int, sequence: int) -> None:
        transfers = self._transfers.get(stream, {})
        transfers.pop(sequence, None)
        if not transfers:
            self._transfers.pop(stream, None)

    def _drop_lossy_transfer(self) -> None:
        self.counters.dropped += len(self._transfers.pop(LOSSY, ()))

    def _next_latest(self, now: float) -> EventBatch | None:
        if LATEST in self._transfers:
            return None
        pending = self._pending_latest
        if pending is not None:
            if self._latest_retry_at > now:
                return None
            # No acknowledgment arrived: send again, with newer versions where there are any.
            newest = {event.event: event for event in pending.events} | self._latest
            is_retry = True
        else:
            newest, is_retry = self._latest, False
        if not newest:
            return None
        events = self._fitting(newest)
        self._latest = {name: newest[name] for name in list(newest)[len(events) :]}
        self._sequences[LATEST] += 1
        batch = EventBatch(LATEST, self._sequences[LATEST], events, is_retry)
        self._pending_latest = batch
        self._latest_retry_at = now + self._retry_s
        return None if self._in_fragments(batch) else batch

    def _fitting(self, newest: dict[str, EncodedEvent]) -> tuple[EncodedEvent, ...]:
        """Return the first event and those after it that fit into the same frame."""
        size, count = 0, 0
        for event in newest.values():
            size += event.size
            if count and (size > self._batch_bytes or self._is_large(event)):
                break
            count += 1
        return tuple(newest.values())[:count]

    def _next_reliable(self, stream: int, now: float) -> EventBatch | None:
        outbox = self._outboxes[stream]
        while (frame := outbox.next_frame(now)) is not None:
            is_retry = frame.attempts > 1
            batch = EventBatch(stream, frame.sequence, frame.messages, is_retry)
            if not self._in_fragments(batch):
                return batch
            outbox.on_fragments(frame.sequence)
        return None

    def _next_lossy(self) -> EventBatch | None:
        if not self._lossy or LOSSY in self._transfers:
            return None
        events = [self._lossy.popleft()]
        size = events[0].size
        while self._lossy and size + self._lossy[0].size <= self._batch_bytes:
            events.append(self._lossy.popleft())
            size += events[-1].size
        self._sequences[LOSSY] += 1
        batch = EventBatch(LOSSY, self._sequences[LOSSY], tuple(events))
        return None if self._in_fragments(batch) else batch


class Verdict(enum.Enum):
    """How the receiver answers a frame."""

    ACCEPTED = "accepted"
    DUPLICATE = "duplicate"
    BUSY = "busy"


@dataclass(slots=True)
class InboxCounters:
    """Counters of an inbox."""

    delivered: int = 0
    duplicates: int = 0
    refused: int = 0


@dataclass(slots=True)
class Inbox(Generic[T]):
    """The receiver's side of the reliable stream.

    A frame that arrives early, within the window, is kept until the gap before it is filled. The
    frame that fills the gap is accepted even if the inbox is full, because nothing can be taken
    before it. The inbox therefore holds at most ``max_bytes`` plus two of the largest frames.

    Args:
        max_bytes: how many bytes may wait to be taken.
        window: how many frames the sender may have unacknowledged.
        max_unhandled: how many messages may be taken and not yet handled; a frame is acknowledged
            once :meth:`on_handled` was called for each of its messages. None: no limit; a frame is
            acknowledged once it is accepted.

    Attributes:
        acknowledged: the newest frame that is acknowledged, with all before it; 0: none.
    """

    max_bytes: int
    window: int = 8
    max_unhandled: int | None = None
    acknowledged: int = 0
    counters: InboxCounters = field(default_factory=InboxCounters)
    _highest: int = 0
    _unhandled: deque[list[int]] = field(default_factory=deque)
    _n_taken: int = 0
    _early: dict[int, tuple[T, ...]] = field(default_factory=dict)
    _ready: deque[T] = field(default_factory=deque)
    _bytes: int = 0

    @property
    def n_bytes(self) -> int:
        """Bytes that are accepted and not yet taken, early frames included."""
        return self._bytes

    @property
    def credit(self) -> int:
        """How many more bytes are accepted."""
        return max(0, self.max_bytes - self._bytes)

    def __len__(self) -> int:
        return len(self._ready)

    @property
    def has_ready(self) -> bool:
        """Whether messages can be taken."""
        # After the limit was reached, half of the messages are handled before more are taken.
        limit = self.max_unhandled
        return bool(self._ready) and (limit is None or self._n_taken <= limit // 2)

    @property
    def waiting(self) -> Iterator[T]:
        """The messages that are accepted and not yet taken, early ones included."""
        return chain(self._ready, *self._early.values())

    def has(self, sequence: int) -> bool:
        """Return whether a frame was accepted.

        Raises:
            FrameError: if no sender with this window can have sent this number.
        """
        if not 1 <= sequence <= self._highest + self.window:
            raise FrameError(
                f"got frame {sequence} after frame {self._highest}, outside the window of "
                f"{self.window}; the peer does not follow the protocol, check that all hosts have "
                "the same version of dmiddleware"
            )
        return sequence <= self._highest or sequence in self._early

    def on_frame(self, sequence: int, messages: Sequence[T]) -> Verdict:
        """Process a frame.

        Returns:
            ``BUSY`` frames have to be sent again. Others are acknowledged up to
            :attr:`acknowledged`, and kept if they come after it.

        Raises:
            FrameError: if no sender with this window can have sent this number.
        """
        if self.has(sequence):
            self.counters.duplicates += 1
            return Verdict.DUPLICATE
        size = sum(message.size for message in messages)
        fills_gap = sequence == self._highest + 1
        if self._bytes + size > self.max_bytes and not self._must_accept(fills_gap):
            self.counters.refused += 1
            return Verdict.BUSY
        self._bytes += size
        self._early[sequence] = tuple(messages)
        self._release()
        return Verdict.ACCEPTED

    def take(
        self,
        n: int | None = None,
        *,
        max_bytes: int | None = None,
        holds: Callable[[T], bool] | None = None,
    ) -> list[T]:
        """Remove and return the next messages in order.

        Args:
            n: the largest number of messages; None: no limit.
            max_bytes: the largest number of bytes, although one message is always returned; None:
                no limit. Taking messages makes room for new ones, so a caller that takes more than
                it handles at once raises the bound on memory by that much.
            holds: whether a message stays here, with those after it; None: none does.
        """
        taken: list[T] = []
        size = 0
        if n is not None and self.max_unhandled is not None:
            n = min(n, self.max_unhandled - self._n_taken)
        while self._ready and (n is None or len(taken) < n):
            if holds is not None and holds(self._ready[0]):
                break
            if taken and max_bytes is not None and size + self._ready[0].size > max_bytes:
                break
            taken.append(self._ready.popleft())
            size += taken[-1].size
        self._bytes -= size
        self._n_taken += len(taken)
        self.counters.delivered += len(taken)
        return taken

    def take_out(self, matches: Callable[[T], bool]) -> list[T]:
        """Remove and return messages that need not wait for those before them.

        Not for an inbox whose messages are acknowledged when handled.
        """
        taken = [message for message in self._ready if matches(message)]
        if taken:
            self._ready = deque(message for message in self._ready if not matches(message))
            self._bytes -= sum(message.size for message in taken)
            self.counters.delivered += len(taken)
        return taken

    def on_handled(self) -> bool:
        """Note that the oldest message that was taken has been handled.

        Returns:
            Whether :attr:`acknowledged` has changed.
        """
        self._n_taken -= 1
        self._unhandled[0][1] -= 1
        return self._acknowledge_handled()

    def _must_accept(self, fills_gap: bool) -> bool:
        # An empty inbox accepts a message of any size; a full one the frame that fills the gap.
        return self._bytes == 0 or (fills_gap and not self._ready)

    def _release(self) -> None:
        while self._highest + 1 in self._early:
            self._highest += 1
            messages = self._early.pop(self._highest)
            self._ready.extend(messages)
            if self.max_unhandled is not None:
                self._unhandled.append([self._highest, len(messages)])
        if self.max_unhandled is None:
            self.acknowledged = self._highest
        else:
            self._acknowledge_handled()

    def _acknowledge_handled(self) -> bool:
        before = self.acknowledged
        while self._unhandled and self._unhandled[0][1] == 0:
            self.acknowledged = self._unhandled.popleft()[0]
        return self.acknowledged != before


@dataclass(slots=True)
class IncomingCounters:
    """Events that were received and, on purpose, not delivered."""

    superseded: int = 0
    dropped: int = 0
    duplicates: int = 0


class IncomingStreams:
    """The streams from one peer.

    Args:
        max_bytes: bound of each of the two reliable streams.
        window: how many frames of each of them the peer may have unacknowledged.
        max_lossy: how many lossy events may wait; beyond that the oldest are dropped and counted.

    Attributes:
        inbox: the reliable stream that is acknowledged when accepted.
        inbox_handled: the one that is acknowledged when handled.
    """

    def __init__(self, *, max_bytes: int, window: int, max_lossy: int = 1024) -> None:
        self.inbox: Inbox[EncodedEvent] = Inbox(max_bytes, window)
        self.inbox_handled: Inbox[EncodedEvent] = Inbox(max_bytes, window, MAX_UNHANDLED)
        self.counters = IncomingCounters()
        self._latest: dict[str, EncodedEvent] = {}
        self._lossy: deque[EncodedEvent] = deque()
        self._max_lossy = max_lossy
        self._seen = {LATEST: 0, LOSSY: 0}
        self._assemblies: dict[int, Assembly] = {}

    @property
    def large_bytes(self) -> int:
        """Bytes of the large events that are arriving, or have arrived and were not yet taken."""
        waiting = chain(
            self.inbox.waiting, self.inbox_handled.waiting, self._latest.values(), self._lossy
        )
        arrived = sum(event.image.total for event in waiting if event.image is not None)
        return arrived + sum(assembly.total for assembly in self._assemblies.values())

    def assembly(self, stream: int, sequence: int) -> Assembly | None:
        """Return the memory that was granted for a frame in fragments, or None."""
        found = self._assemblies.get(stream)
        return found if found is not None and found.sequence == sequence else None

    def grant(self, assembly: Assembly) -> None:
        """Receive a frame in fragments; an unfinished one of the same stream is dropped."""
        self._assemblies[assembly.stream] = assembly

    def drop_unfinished(self) -> None:
        """Free the memory of frames that have not arrived in full; they can start over."""
        self._assemblies.clear()

    def has(self, stream: int, sequence: int) -> bool:
        """Return whether a frame was accepted, or is older than one that was.

        Raises:
            FrameError: for an unknown stream, or a number that no peer can have sent.
        """
        if (inbox := self.inbox_of(stream)) is not None:
            return inbox.has(sequence)
        if stream not in self._seen:
            raise FrameError(
                f"got an event on unknown stream {stream}; install the same version of dmiddleware "
                "on all hosts"
            )
        return sequence <= self._seen[stream]

    @property
    def has_events(self) -> bool:
        """Whether :meth:`take`, or the inbox of events to be handled, would return something."""
        return bool(self._latest or self._lossy or len(self.inbox) or self.inbox_handled.has_ready)

    def inbox_of(self, stream: int) -> Inbox[EncodedEvent] | None:
        """Return the inbox of a reliable stream; None for other streams."""
        if stream == RELIABLE:
            return self.inbox
        return self.inbox_handled if stream == HANDLED else None

    def on_events(self, stream: int, sequence: int, events: Sequence[EncodedEvent]) -> Verdict:
        """Process the events of a frame.

        Raises:
            FrameError: for an unknown stream, or a number that no peer can have sent.
        """
        verdict = self._on_events(stream, sequence, events)
        if self._assemblies and verdict is Verdict.ACCEPTED:
            assembly = self._assemblies.get(stream)
            if assembly is not None and self.has(stream, assembly.sequence):
                del self._assemblies[stream]
        return verdict

    def _on_events(self, stream: int, sequence: int, events: Sequence[EncodedEvent]) -> Verdict:
        if (inbox := self.inbox_of(stream)) is not None:
            return inbox.on_frame(sequence, events)
        if self.has(stream, sequence):
            self.counters.duplicates += 1
            return Verdict.DUPLICATE
        self._seen[stream] = sequence
        if stream == LATEST:
            for event in events:
                # A later task of the peer's program supersedes what an earlier one has sent.
                name = base_name(event.event)
                self.counters.superseded += name in self._latest
                self._latest[name] = event
        else:
            self._lossy.extend(events)
            while len(self._lossy) > self._max_lossy:
                self._lossy.popleft()
                self.counters.dropped += 1
        return Verdict.ACCEPTED

    def take(
        self,
        n: int,
        *,
        max_bytes: int | None = None,
        holds: Callable[[EncodedEvent], bool] | None = None,
    ) -> list[EncodedEvent]:
        """Remove and return up to ``n`` events: latest first, then reliable, then lossy ones.

        Args:
            n: the largest number of events.
            max_bytes: the largest number of bytes of reliable events, see :meth:`Inbox.take`.
            holds: which reliable events stay here, see :meth:`Inbox.take`.
        """
        taken = list(self._latest.values())
        self._latest = {}
        taken += self.inbox.take(max(0, n - len(taken)), max_bytes=max_bytes, holds=holds)
        while self._lossy and len(taken) < n:
            taken.append(self._lossy.popleft())
        return taken
