"""The event streams between two nodes: reliable, latest and lossy, in both directions.

Reliable events arrive once, in order and whole, within bounded memory; see
:mod:`~dmiddleware.router.protocol.delivery`. There are two such streams. In one, an acknowledgment
means *accepted into the inbox*; in the other, that all events of the frame have been *handled*. Of
``latest`` events only the newest of each name is sent, and ``lossy`` events are dropped, and
counted, when too many are waiting or a connection ends.

One pair of :class:`OutgoingStreams` and :class:`IncomingStreams` serves two nodes. It outlives
their connections, and ends with the incarnation of either node.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Final

import msgspec

from dmiddleware.errors import FrameError
from dmiddleware.event_names import base_name
from dmiddleware.router.protocol.delivery import Inbox, Outbox
from dmiddleware.router.protocol.fragments import Assembly, Fragment, Transfer
from dmiddleware.router.protocol.session_frames import States
from dmiddleware.router.wire.envelope import SUBSCRIPTIONS_EVENT, EncodedEvent
from dmiddleware.router.wire.frame import MAX_BUFFERS

__all__ = [
    "RELIABLE",
    "LATEST",
    "LOSSY",
    "HANDLED",
    "EventBatch",
    "IncomingStreams",
    "OutgoingStreams",
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

HOLD_BYTES: Final = 1 << 14
"""Under load, up to this many bytes of small events are held back to share a frame."""


class EventBatch(msgspec.Struct, frozen=True):
    """Events that are sent as one frame.

    Attributes:
        stream: ``RELIABLE``, ``LATEST``, ``LOSSY`` or ``HANDLED``.
        sequence: the frame's number in its stream; 0: it has no events, and only asks.
        events: the events, in order.
        fragment: the only part of the frame that is sent; None: all of it.
        asks: whether the peer should answer with its state.
    """

    stream: int
    sequence: int
    events: tuple[EncodedEvent, ...]
    fragment: Fragment | None = None
    asks: bool = False


@dataclass(slots=True)
class OutgoingCounters:
    """Events that were left out on purpose."""

    dropped: int = 0
    superseded: int = 0


class OutgoingStreams:
    """The streams to one peer.

    Args:
        max_bytes: bound of each of the two reliable streams.
        batch_bytes: small events are joined to frames of up to this size, at most
            ``MAX_BATCH_BYTES``.
        max_lossy: how many lossy events may wait; beyond that the oldest are dropped and counted.
        fragment_bytes: the size of fragments.
        largest_whole_bytes: larger events are sent in fragments.

    Attributes:
        outbox: the reliable stream that is acknowledged when accepted.
        outbox_handled: the one that is acknowledged when handled.
        counters: what was left out.
    """

    def __init__(
        self,
        *,
        max_bytes: int,
        batch_bytes: int = 1 << 18,
        max_lossy: int = 1024,
        fragment_bytes: int = 4 << 20,
        largest_whole_bytes: int = 16 << 20,
    ) -> None:
        self.outbox, self.outbox_handled = (
            Outbox[EncodedEvent](
                max_bytes=max_bytes, batch_bytes=bytes_each, hold_bytes=min(HOLD_BYTES, bytes_each)
            )
            for bytes_each in (batch_bytes, min(batch_bytes, HANDLED_BATCH_BYTES))
        )
        self._outboxes = {RELIABLE: self.outbox, HANDLED: self.outbox_handled}
        self.counters = OutgoingCounters()
        self._batch_bytes = batch_bytes
        self._max_lossy = max_lossy
        self._fragment_bytes = fragment_bytes
        self._largest_whole_bytes = largest_whole_bytes
        # Nothing is sent before the peer's first state over the connection has arrived, nor while
        # it accepts nothing.
        self._is_open = self._is_paused = False
        self._latest: dict[str, EncodedEvent] = {}
        self._unconfirmed: EventBatch | None = None
        self._lossy: deque[EncodedEvent] = deque()
        # The lossy frames that the peer has not mentioned yet: their numbers and events.
        self._lossy_sent: deque[tuple[int, int]] = deque()
        self._sequences = {LATEST: 0, LOSSY: 0}
        # The large frame of each stream that is being sent.
        self._transfers: dict[int, tuple[EventBatch, Transfer]] = {}
        self._sent_fragment = False

    @property
    def is_open(self) -> bool:
        """Whether the peer has sent its states over this connection."""
        return self._is_open

    @property
    def is_empty(self) -> bool:
        """Whether no reliable or latest event is waiting or unacknowledged."""
        is_sent = self.outbox.is_empty and self.outbox_handled.is_empty
        return is_sent and not self._latest and self._unconfirmed is None

    @property
    def n_messages(self) -> int:
        """How many reliable events have not been acknowledged."""
        return self.outbox.n_messages + self.outbox_handled.n_messages

    @property
    def n_bytes(self) -> int:
        """How many bytes they have."""
        return self.outbox.n_bytes + self.outbox_handled.n_bytes

    @property
    def n_resent(self) -> int:
        """How many reliable frames were sent again."""
        return self.outbox.n_resent + self.outbox_handled.n_resent

    @property
    def undelivered(self) -> Counter[str]:
        """How many accepted reliable events have not been acknowledged, by name."""
        events = self.outbox.unacknowledged() + self.outbox_handled.unacknowledged()
        counts = Counter(event.event for event in events)
        # The nodes' own control events are not counted as losses.
        del counts[SUBSCRIPTIONS_EVENT]
        return counts

    def drain(self) -> None:
        """Have everything acknowledged soon, because nothing may follow."""
        for outbox in self._outboxes.values():
            outbox.is_draining = True

    def give_up(self) -> Counter[str]:
        """Drop all waiting events; return the lost reliable ones, as :attr:`undelivered`."""
        self._latest.clear()
        self._unconfirmed = None
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
        unconfirmed = self._unconfirmed
        if unconfirmed is not None and LATEST not in self._transfers:
            # The old version will not be sent again, so a slow reader must not keep it in memory.
            kept = tuple(old for old in unconfirmed.events if old.event != event.event)
            self._unconfirmed = msgspec.structs.replace(unconfirmed, events=kept)

    def put_lossy(self, event: EncodedEvent) -> None:
        """Queue an event that may be dropped."""
        if len(self._lossy) >= self._max_lossy:
            self._lossy.popleft()
            self.counters.dropped += 1
        self._lossy.append(event)

    def next_batch(self) -> EventBatch | None:
        """Return what to send now: latest events first, then reliable, then lossy ones.

        Fragments of large events take turns with all others. Behind all of them, a batch without a
        sequence asks for the state of its stream.
        """
        if not self._is_open or self._is_paused:
            return None
        # The usual case, at the end of each round of frames and for each heartbeat.
        if (
            self.outbox.is_quiet
            and self.outbox_handled.is_quiet
            and not (self._latest or self._lossy or self._transfers)
        ):
            return None
        batch = self._next_fragment() if self._transfers and not self._sent_fragment else None
        if batch is None and self._latest and self._unconfirmed is None:
            batch = self._next_latest()
        batch = batch or self._next_reliable(RELIABLE) or self._next_reliable(HANDLED)
        if batch is None and self._lossy:
            batch = self._next_lossy()
        if batch is None and self._transfers:
            batch = self._next_fragment()
        self._sent_fragment = batch is not None and batch.fragment is not None
        if batch is None:
            for stream, outbox in self._outboxes.items():
                if stream not in self._transfers and outbox.take_ask():
                    return EventBatch(stream, 0, (), asks=True)
        return batch

    def on_connect(self, capacity: int) -> None:
        """Start over with the same process, which says how far it has got.

        Args:
            capacity: how many bytes each of its inboxes takes when it is empty.
        """
        self._is_open = False
        self._transfers.clear()
        for outbox in self._outboxes.values():
            outbox.on_connect(capacity)

    def on_states(self, states: States) -> None:
        """Process the peer's states.

        Raises:
            FrameError: if no peer that follows the protocol can have sent them.
        """
        for stream, outbox in self._outboxes.items():
            if (state := states.of(stream)) is not None:
                outbox.on_state(state)
        self._on_lossy(states.lossy)
        self._on_latest(states.latest, is_lost=not self._is_open)
        self._is_open, self._is_paused = True, not states.accepts
        for stream, sequence, offset in states.grants:
            batch, transfer = self._transfers.get(stream, (None, None))
            if batch is not None and transfer is not None and batch.sequence == sequence:
                transfer.on_grant(offset)

    def on_new_peer(self) -> None:
        """Start over with another process under the same node id."""
        self._is_open = False
        self._transfers.clear()
        for outbox in self._outboxes.values():
            outbox.on_new_peer()
        if self._unconfirmed is not None:
            self._latest = {e.event: e for e in self._unconfirmed.events} | self._latest
            self._unconfirmed = None
        self._count_lost_lossy()
        self._sequences = {LATEST: 0, LOSSY: 0}

    def _on_latest(self, sequence: int, *, is_lost: bool) -> None:
        """Confirm the latest events that have arrived; send them again if they were lost."""
        unconfirmed = self._unconfirmed
        if unconfirmed is None:
            return
        if sequence >= unconfirmed.sequence:
            self._unconfirmed = None
        elif is_lost:
            # Newer versions replace them. The peer keeps the part of a large event that it has.
            again = {e.event: e for e in unconfirmed.events if e.event not in self._latest}
            if not again or not self._in_fragments(unconfirmed):
                self._latest = again | self._latest
                self._unconfirmed = None

    def _on_lossy(self, sequence: int) -> None:
        while self._lossy_sent and self._lossy_sent[0][0] <= sequence:
            self._lossy_sent.popleft()
        if not self._is_open:
            self._count_lost_lossy()

    def _count_lost_lossy(self) -> None:
        self.counters.dropped += sum(n_events for _, n_events in self._lossy_sent)
        self._lossy_sent.clear()

    def _next_fragment(self) -> EventBatch | None:
        for stream, (batch, transfer) in self._transfers.items():
            fragment = transfer.next_fragment()
            if fragment is not None:
                del self._transfers[stream]
                if not transfer.is_sent:
                    # The next one is of another stream, if there is any.
                    self._transfers[stream] = batch, transfer
                return msgspec.structs.replace(batch, fragment=fragment)
        return None

    def _in_fragments(self, batch: EventBatch) -> bool:
        """Return whether a frame has to be sent in fragments; if so, start that."""
        # Events that share a frame are never large.
        event = batch.events[0] if len(batch.events) == 1 else None
        if event is None or (
            event.size <= self._largest_whole_bytes and len(event.buffers) < MAX_BUFFERS
        ):
            return False
        transfer = Transfer(event, fragment_bytes=self._fragment_bytes)
        self._transfers[batch.stream] = batch, transfer
        return True

    def _next_latest(self) -> EventBatch | None:
        events = self._fitting(self._latest)
        for event in events:
            del self._latest[event.event]
        self._sequences[LATEST] += 1
        batch = EventBatch(LATEST, self._sequences[LATEST], events)
        self._unconfirmed = batch
        return None if self._in_fragments(batch) else batch

    def _fitting(self, newest: dict[str, EncodedEvent]) -> tuple[EncodedEvent, ...]:
        """Return the first event and those after it that fit into the same frame."""
        size, count = 0, 0
        for event in newest.values():
            size += event.size
            if count and size > self._batch_bytes:
                break
            count += 1
        return tuple(newest.values())[:count]

    def _next_reliable(self, stream: int) -> EventBatch | None:
        # Its next frame comes after all fragments of the last one.
        if stream in self._transfers:
            return None
        frame = self._outboxes[stream].next_frame()
        if frame is None:
            return None
        batch = EventBatch(stream, frame.sequence, frame.messages, asks=frame.asks)
        return None if self._in_fragments(batch) else batch

    def _next_lossy(self) -> EventBatch | None:
        if LOSSY in self._transfers:
            return None
        events = [self._lossy.popleft()]
        size = events[0].size
        while self._lossy and size + self._lossy[0].size <= self._batch_bytes:
            events.append(self._lossy.popleft())
            size += events[-1].size
        self._sequences[LOSSY] += 1
        batch = EventBatch(LOSSY, self._sequences[LOSSY], tuple(events))
        self._lossy_sent.append((batch.sequence, len(events)))
        return None if self._in_fragments(batch) else batch


@dataclass(slots=True)
class IncomingCounters:
    """Events that were received and, on purpose, not delivered."""

    superseded: int = 0
    dropped: int = 0


class IncomingStreams:
    """The streams from one peer.

    Args:
        max_bytes: bound of each of the two reliable streams.
        peer_bytes: how many unacknowledged bytes of each of them the peer keeps.
        max_lossy: how many lossy events may wait; beyond that the oldest are dropped and counted.

    Attributes:
        inbox: the reliable stream that is acknowledged when accepted.
        inbox_handled: the one that is acknowledged when handled.
        counters: what was left out.
    """

    def __init__(
        self, *, max_bytes: int, peer_bytes: int | None = None, max_lossy: int = 1024
    ) -> None:
        self.inbox: Inbox[EncodedEvent] = Inbox(max_bytes, peer_bytes=peer_bytes)
        self.inbox_handled: Inbox[EncodedEvent] = Inbox(
            max_bytes, max_unhandled=MAX_UNHANDLED, peer_bytes=peer_bytes
        )
        self.counters = IncomingCounters()
        self._inboxes = {RELIABLE: self.inbox, HANDLED: self.inbox_handled}
        self._latest: dict[str, EncodedEvent] = {}
        self._lossy: deque[EncodedEvent] = deque()
        self._max_lossy = max_lossy
        self._seen = {LATEST: 0, LOSSY: 0}
        self._has_news = True
        self._is_latest_due = False
        self._assemblies: dict[int, Assembly] = {}
        self._grants: list[Assembly] = []

    @property
    def large_bytes(self) -> int:
        """Bytes of the large events that are arriving, or have arrived and were not yet taken."""
        waiting = chain(
            self.inbox.waiting, self.inbox_handled.waiting, self._latest.values(), self._lossy
        )
        arrived = sum(event.image.total for event in waiting if event.image is not None)
        return arrived + sum(assembly.total for assembly in self._assemblies.values())

    @property
    def has_events(self) -> bool:
        """Whether :meth:`take` would return something."""
        return bool(
            self._latest or self._lossy or self.inbox.has_ready or self.inbox_handled.has_ready
        )

    @property
    def is_due(self) -> bool:
        """Whether the states should be sent now, rather than with the next heartbeat."""
        return (
            self.inbox.is_due
            or self.inbox_handled.is_due
            or self._is_latest_due
            or bool(self._grants)
        )

    @property
    def has_news(self) -> bool:
        """Whether the states have changed since they were sent over this connection."""
        return self._has_news or self.inbox.has_news or self.inbox_handled.has_news or self.is_due

    def take_states(self, *, since: int = 0, accepts: bool = True, resend: bool = False) -> States:
        """Return the states, which are sent now; the arguments are a part of them."""
        states = States(
            tuple((stream, *inbox.take_state()) for stream, inbox in self._inboxes.items()),
            self._seen[LATEST],
            self._seen[LOSSY],
            since=since,
            accepts=accepts,
            resend=resend,
            grants=tuple(
                (assembly.stream, assembly.sequence, assembly.offset) for assembly in self._grants
            ),
        )
        self._grants.clear()
        self._has_news = self._is_latest_due = False
        return states

    def on_restart(self) -> None:
        """Note that the sender goes back to the states it gets next, and asks again for memory."""
        self._grants.clear()
        # Lossy events do not continue.
        self.drop_unfinished(LOSSY)
        self._has_news = True

    def check_next(self, stream: int, sequence: int) -> None:
        """Check that a frame may be the next one of its stream.

        Raises:
            FrameError: if it may not.
        """
        last = self._seen.get(stream)
        if last is None:
            inbox = self._inbox_of(stream)
            is_next, last = sequence == inbox.accepted + 1, inbox.accepted
        else:
            is_next = sequence > last
        if not is_next:
            raise FrameError(
                f"got frame {sequence} of stream {stream} after frame {last}; the peer does not "
                "follow the protocol, check that all hosts have the same version of dmiddleware"
            )

    def on_ask(self, stream: int, *, until_empty: bool = True) -> None:
        """Note that the peer asks for the state of a reliable stream.

        Raises:
            FrameError: if it is another stream.
        """
        self._inbox_of(stream).on_ask(until_empty=until_empty)

    def on_events(self, stream: int, sequence: int, events: Sequence[EncodedEvent]) -> None:
        """Process the events of a frame.

        Raises:
            FrameError: for an unknown stream, or if it is not the next frame, or too large.
        """
        self._assemblies.pop(stream, None)
        if (inbox := self._inboxes.get(stream)) is not None:
            inbox.on_frame(sequence, events)
            return
        self.check_next(stream, sequence)
        self._seen[stream], self._has_news = sequence, True
        if stream == LATEST:
            self._is_latest_due = True
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

    def assembly(self, stream: int, sequence: int) -> Assembly | None:
        """Return the memory that was granted for a large frame, or None."""
        assembly = self._assemblies.get(stream)
        return assembly if assembly is not None and assembly.sequence == sequence else None

    def grant(self, assembly: Assembly) -> None:
        """Receive a large frame; an unfinished one of the same stream is dropped."""
        self._assemblies[assembly.stream] = assembly
        self._grants.append(assembly)

    def drop_unfinished(self, *streams: int) -> None:
        """Free the memory of large frames that have not arrived in full; they can start over.

        Args:
            streams: their streams; none: all.
        """
        for stream in streams or tuple(self._assemblies):
            self._assemblies.pop(stream, None)

    def take(
        self,
        n: int,
        *,
        max_bytes: int | None = None,
        holds: Callable[[EncodedEvent], bool] | None = None,
    ) -> tuple[list[EncodedEvent], list[EncodedEvent]]:
        """Remove and return events: those that are acknowledged when handled, and the others.

        The others are first the latest events, then reliable, then lossy ones.

        Args:
            n: the largest number of events of each list.
            max_bytes: the largest number of bytes of reliable events, see :meth:`Inbox.take`.
            holds: which reliable events stay here, see :meth:`Inbox.take`.
        """
        handled: list[EncodedEvent] = []
        if self.inbox_handled.n_bytes:
            handled = self.inbox_handled.take(n, max_bytes=max_bytes, holds=holds)
        others = list(self._latest.values())
        self._latest = {}
        others += self.inbox.take(max(0, n - len(others)), max_bytes=max_bytes, holds=holds)
        while self._lossy and len(others) < n:
            others.append(self._lossy.popleft())
        return handled, others

    def _inbox_of(self, stream: int) -> Inbox[EncodedEvent]:
        inbox = self._inboxes.get(stream)
        if inbox is None:
            raise FrameError(
                f"got a frame of the unknown stream {stream}; install the same version of "
                "dmiddleware on all hosts"
            )
        return inbox
