"""Reliable delivery: every accepted message arrives once, in order, whole, within bounded memory.

:class:`Outbox` numbers frames, keeps each until it is acknowledged, and sends it again with the
same number when the answer stays away. :class:`Inbox` takes each number once, restores the order,
and tells the sender to wait when it is full. An acknowledgement means *accepted into the inbox*.

Both are pure: they take a time and give back what to do. One pair serves one direction between two
nodes; it outlives connections, and ends with the incarnation of either side.
"""

from __future__ import annotations

import enum
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from dmiddleware.errors import FrameError

__all__ = ["Message", "OutFrame", "Outbox", "Verdict", "Inbox"]


class Message(Protocol):
    """One message, encoded."""

    @property
    def size(self) -> int:
        """Its bytes, which count against bounds."""


T = TypeVar("T", bound=Message)


@dataclass(slots=True)
class OutFrame(Generic[T]):
    """A frame that is under way.

    Attributes:
        sequence: its number, from 1.
        messages: what it carries, in order.
        size: bytes of its messages.
        attempts: how often it was sent.
        not_before: when it may be sent (again), in seconds.
    """

    sequence: int
    messages: tuple[T, ...]
    size: int
    attempts: int = 0
    not_before: float = 0.0


@dataclass(slots=True)
class OutboxCounters:
    """What an outbox has done."""

    accepted: int = 0
    acknowledged: int = 0
    sent_frames: int = 0
    retried_frames: int = 0
    refused_frames: int = 0


class Outbox(Generic[T]):
    """The sender's side.

    Args:
        max_bytes: how many bytes may wait here; beyond it :meth:`offer` refuses. One message is
            always taken into an empty outbox, whatever its size.
        window: how many frames may be unacknowledged.
        batch_bytes: small messages are joined into frames of up to so many bytes.
        hold_bytes: while a frame is under way, messages wait for its answer until there are so many
            bytes of them: that fills frames when there is much to send, and costs little else.
        retry_s: when no answer comes for so long, a frame is sent again.
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
        self._under_way: OrderedDict[int, OutFrame[T]] = OrderedDict()
        self._next_sequence = 1
        self._bytes = 0
        self._credit = 2**63
        self.counters = OutboxCounters()

    @property
    def n_bytes(self) -> int:
        """Bytes accepted and not yet acknowledged."""
        return self._bytes

    @property
    def n_messages(self) -> int:
        """Messages accepted and not yet acknowledged."""
        return len(self._waiting) + sum(len(frame.messages) for frame in self._under_way.values())

    @property
    def empty(self) -> bool:
        """Whether everything accepted has been acknowledged."""
        return not self._waiting and not self._under_way

    def offer(self, message: T) -> bool:
        """Accept a message, unless the outbox is full: then the caller waits and offers again."""
        if self._bytes and self._bytes + message.size > self._max_bytes:
            return False
        self.push(message)
        return True

    def push(self, message: T) -> None:
        """Accept a message even if the outbox is full: for the few that nobody may wait for."""
        self._waiting.append(message)
        self._waiting_bytes += message.size
        self._bytes += message.size
        self.counters.accepted += 1

    def next_frame(self, now: float) -> OutFrame[T] | None:
        """Return a frame to send now, or None.

        First come frames whose answer stayed away, or that were told to wait and have waited; then
        waiting messages, joined, as far as the window and the receiver's credit reach.
        """
        for frame in self._under_way.values():
            if frame.not_before <= now:
                self.counters.retried_frames += 1
                return self._sent(frame, now)
        packed = self._pack()
        return None if packed is None else self._sent(packed, now)

    def next_time(self) -> float | None:
        """Return when :meth:`next_frame` may have something without further input; None: never."""
        return min((frame.not_before for frame in self._under_way.values()), default=None)

    def on_ack(self, sequence: int, credit: int) -> None:
        """Take an acknowledgement.

        Args:
            sequence: the frame that the receiver has accepted.
            credit: how many more bytes it takes.
        """
        self._credit = credit
        frame = self._under_way.pop(sequence, None)
        if frame is not None:
            self._bytes -= frame.size
            self.counters.acknowledged += len(frame.messages)

    def on_busy(self, sequence: int, delay_s: float, now: float) -> None:
        """Take the receiver's word that it is full; the frame is sent again after ``delay_s``."""
        frame = self._under_way.get(sequence)
        if frame is not None:
            frame.not_before = now + delay_s
            self.counters.refused_frames += 1

    def on_failed(self, sequence: int, now: float) -> None:
        """Take note that a sending came to nothing: the frame may be sent again at once."""
        frame = self._under_way.get(sequence)
        if frame is not None:
            frame.not_before = now

    def on_reconnect(self, now: float) -> None:
        """Begin a new connection to the same incarnation: all that is under way is sent again."""
        self._credit = 2**63
        for frame in self._under_way.values():
            frame.not_before = now

    def on_new_peer(self) -> None:
        """Begin anew with another incarnation of the peer.

        What the old one had not acknowledged is numbered from 1 again; what it had is its own loss.
        """
        messages = [m for frame in self._under_way.values() for m in frame.messages]
        self._waiting.extendleft(reversed(messages))
        self._waiting_bytes = self._bytes
        self._under_way.clear()
        self._next_sequence = 1
        self._credit = 2**63

    def give_up(self) -> None:
        """Drop everything that was not acknowledged.

        Frames under way keep their numbers, emptied, so that a peer that comes back after all finds
        no gap in what follows.
        """
        self._waiting.clear()
        self._waiting_bytes = 0
        for frame in self._under_way.values():
            frame.messages, frame.size = (), 0
        self._bytes = 0

    def unacknowledged(self) -> list[T]:
        """Return what would be lost if the outbox were dropped now, in order."""
        under_way = [m for frame in self._under_way.values() for m in frame.messages]
        return under_way + list(self._waiting)

    def _pack(self) -> OutFrame[T] | None:
        if not self._waiting or not self._window_open():
            return None
        if self._under_way and self._waiting_bytes < self._hold_bytes:
            return None
        if self._under_way and self._credit < self._waiting[0].size:
            # With nothing under way a frame goes out all the same: its BUSY or ACK brings credit.
            return None
        messages = [self._waiting.popleft()]
        size = messages[0].size
        limit = min(self._batch_bytes, self._credit)
        while self._waiting and size + self._waiting[0].size <= limit:
            message = self._waiting.popleft()
            messages.append(message)
            size += message.size
        self._waiting_bytes -= size
        frame = OutFrame(self._next_sequence, tuple(messages), size)
        self._next_sequence += 1
        self._credit -= size
        self._under_way[frame.sequence] = frame
        return frame

    def _window_open(self) -> bool:
        # The window reaches from the oldest frame without an answer, as the receiver counts it.
        oldest = next(iter(self._under_way), self._next_sequence)
        return self._next_sequence < oldest + self._window

    def _sent(self, frame: OutFrame[T], now: float) -> OutFrame[T]:
        frame.attempts += 1
        frame.not_before = now + self._retry_s
        self.counters.sent_frames += 1
        return frame


class Verdict(enum.Enum):
    """What an inbox says of a frame."""

    ACCEPTED = "accepted"
    DUPLICATE = "duplicate"
    BUSY = "busy"


@dataclass(slots=True)
class InboxCounters:
    """What an inbox has seen."""

    delivered: int = 0
    duplicates: int = 0
    refused: int = 0


@dataclass(slots=True)
class Inbox(Generic[T]):
    """The receiver's side.

    A frame within the window behind a gap is kept until the gap is filled; the frame that fills the
    gap is taken even when the inbox is full, since nothing can leave it before. So at most
    ``max_bytes`` and two of the largest frames are held.

    Args:
        max_bytes: how many bytes may wait here to be taken.
        window: how many frames the sender may have under way.
    """

    max_bytes: int
    window: int = 8
    counters: InboxCounters = field(default_factory=InboxCounters)
    _highest: int = 0
    _early: dict[int, tuple[T, ...]] = field(default_factory=dict)
    _ready: deque[T] = field(default_factory=deque)
    _bytes: int = 0

    @property
    def n_bytes(self) -> int:
        """Bytes accepted and not yet taken, those behind a gap included."""
        return self._bytes

    @property
    def credit(self) -> int:
        """How many more bytes are accepted."""
        return max(0, self.max_bytes - self._bytes)

    def __len__(self) -> int:
        return len(self._ready)

    def on_frame(self, sequence: int, messages: Sequence[T]) -> Verdict:
        """Take a frame in.

        Returns:
            ``ACCEPTED`` and ``DUPLICATE`` are acknowledged, with :attr:`credit`; ``BUSY`` is not.

        Raises:
            FrameError: for a number that no sender with this window can have sent.
        """
        if not 1 <= sequence <= self._highest + self.window:
            raise FrameError(
                f"frame {sequence} cannot follow frame {self._highest} in a window of "
                f"{self.window}; the peer is not what it claims, or counts otherwise"
            )
        if sequence <= self._highest or sequence in self._early:
            self.counters.duplicates += 1
            return Verdict.DUPLICATE
        size = sum(message.size for message in messages)
        fills_gap = sequence == self._highest + 1
        if self._bytes + size > self.max_bytes and not self._must_take(fills_gap):
            self.counters.refused += 1
            return Verdict.BUSY
        self._bytes += size
        self._early[sequence] = tuple(messages)
        self._release()
        return Verdict.ACCEPTED

    def take(self, n: int | None = None, *, max_bytes: int | None = None) -> list[T]:
        """Remove and return the next messages in order.

        Args:
            n: at most so many; None: all.
            max_bytes: no more than fit, but one in any case; None: no limit. What is taken makes
                room for as much again, so who takes more than it handles at once doubles the bound.
        """
        taken: list[T] = []
        size = 0
        while self._ready and (n is None or len(taken) < n):
            if taken and max_bytes is not None and size + self._ready[0].size > max_bytes:
                break
            taken.append(self._ready.popleft())
            size += taken[-1].size
        self._bytes -= size
        self.counters.delivered += len(taken)
        return taken

    def _must_take(self, fills_gap: bool) -> bool:
        # An empty inbox takes a message of any size; a full one what its early frames wait for.
        return self._bytes == 0 or (fills_gap and not self._ready)

    def _release(self) -> None:
        while self._highest + 1 in self._early:
            self._highest += 1
            self._ready.extend(self._early.pop(self._highest))
