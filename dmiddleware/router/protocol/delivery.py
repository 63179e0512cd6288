"""Reliable delivery of messages over connections that keep the order.

:class:`Outbox` joins messages to numbered frames and keeps each frame until it is acknowledged.
:class:`Inbox` accepts the frames in order and says how far it has got and how much more it takes:
its *state*. The state travels with any frame of the other direction, or with the next heartbeat; a
sender that cannot continue without it asks for it. At the start of each connection both sides send
theirs, and the frames after it are sent again. So nothing is lost, repeated or overtaken, and
neither side needs timers.

The sender never has more on its way than the receiver takes. A frame that is larger than an inbox
is sent when the inbox is empty.

Small messages are joined as follows. A message is sent at once, in a frame of its own. After a few
of these without news from the peer, a frame also asks for the state, and what comes meanwhile is
held back. So under load there is one frame for each answer, and otherwise no answer at all.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Generic, NamedTuple, Protocol, TypeVar

from dmiddleware.errors import FrameError

__all__ = ["Inbox", "InboxState", "Message", "MessageBatch", "Outbox"]

_ASK_AFTER: Final = 8
"""After this many frames without news from the peer, one asks for its state."""


class Message(Protocol):
    """An encoded message."""

    @property
    def size(self) -> int:
        """Number of bytes that count against the bounds; the same at both sides."""
        ...


T = TypeVar("T", bound=Message)


class InboxState(NamedTuple):
    """What a receiver tells its sender.

    Attributes:
        acknowledged: the newest frame that is acknowledged, with all before it.
        accepted: the newest frame that it has, which it may acknowledge later.
        credit: how many more bytes it takes after the accepted frames.
    """

    acknowledged: int
    accepted: int
    credit: int


@dataclass(slots=True)
class MessageBatch(Generic[T]):
    """Messages that are sent and acknowledged together, as one frame.

    Attributes:
        sequence: the frame's number, from 1.
        messages: its messages, in order.
        size: their bytes.
        asks: whether the peer should answer it with its state.
    """

    sequence: int
    messages: tuple[T, ...]
    size: int
    asks: bool = False


def _due_bytes(inbox_bytes: int, outbox_bytes: int) -> int:
    """Return after how many bytes a receiver sends its state, so that neither side waits for it."""
    return max(1, min(inbox_bytes, outbox_bytes) // 4)


class Outbox(Generic[T]):
    """The sender's side of one stream of messages.

    Args:
        max_bytes: how many bytes may wait here until they are acknowledged; beyond that
            :meth:`offer` refuses. An empty outbox accepts one message of any size.
        batch_bytes: small messages are joined to frames of up to this size.
        hold_bytes: under load, up to this many bytes are held back while an answer is on its way.

    Attributes:
        n_bytes: bytes that are accepted and not yet acknowledged.
        n_resent: how many frames were sent again.
        is_draining: whether the peer should acknowledge soon, because nothing may follow.
    """

    def __init__(self, *, max_bytes: int, batch_bytes: int, hold_bytes: int = 0) -> None:
        if max_bytes < 1 or batch_bytes < 1:
            raise ValueError(
                f"max_bytes and batch_bytes must be at least 1, got {max_bytes} and {batch_bytes}"
            )
        self._max_bytes = max_bytes
        self.n_resent = 0
        self.is_draining = False
        self._batch_bytes = batch_bytes
        self._hold_bytes = hold_bytes
        self._waiting: deque[T] = deque()
        self._waiting_bytes = 0
        self._frames: deque[MessageBatch[T]] = deque()
        self.n_bytes = 0
        self._acknowledged = 0
        # The newest frame that was sent over this connection, and the credit that is left after it.
        # No credit: the peer's state is not known yet.
        self._sent = 0
        self._credit: int | None = None
        # The newest frame that was made.
        self._made = 0
        self._capacity = 0
        self._is_refusing = False
        self._asked_after: int | None = None
        self._newest = 0
        # How many bytes are sent and not accepted, as far as the peer has said.
        self._on_the_way = 0
        # How many frames were sent since the peer's last state, and whether one asked for it.
        self._n_since_state = 0
        self._has_asked = False

    @property
    def n_messages(self) -> int:
        """Messages that are accepted and not yet acknowledged."""
        return len(self._waiting) + sum(len(frame.messages) for frame in self._frames)

    @property
    def is_empty(self) -> bool:
        """Whether everything accepted has been acknowledged."""
        return not self._waiting and not self._frames

    @property
    def is_quiet(self) -> bool:
        """Whether there is nothing to send, and nothing to ask."""
        return not (
            self._waiting or self._sent < self._made or self._is_refusing or self.is_draining
        )

    @property
    def is_holding(self) -> bool:
        """Whether small messages are held back until the peer's state arrives."""
        return (
            self._has_asked and self._waiting_bytes < self._hold_bytes and self._sent == self._made
        )

    @property
    def is_blocked(self) -> bool:
        """Whether something waits for the peer to take more, or to say how much it takes."""
        return self._fits_next() is False

    def offer(self, message: T, *, always: bool = False) -> bool:
        """Accept a message, or return False if the outbox is full; the caller then tries again.

        Args:
            message: the message.
            always: accept it even if the outbox is full; for control messages that cannot wait.
        """
        size = message.size
        if not always:
            self._is_refusing = bool(self.n_bytes) and self.n_bytes + size > self._max_bytes
            if self._is_refusing:
                return False
        self._waiting.append(message)
        self._waiting_bytes += size
        self.n_bytes += size
        return True

    def next_frame(self) -> MessageBatch[T] | None:
        """Return the frame to send now, or None."""
        if self._credit is None or self.is_holding or not self._fits_next():
            return None
        if self._sent == self._made:
            messages = [self._waiting.popleft()]
            size = messages[0].size
            limit = min(self._batch_bytes, self._credit)
            while self._waiting and size + self._waiting[0].size <= limit:
                messages.append(self._waiting.popleft())
                size += messages[-1].size
            self._waiting_bytes -= size
            self._made += 1
            self._frames.append(MessageBatch(self._made, tuple(messages), size))
        # Frames have consecutive numbers.
        frame = self._frames[self._sent - self._made]
        self._sent = frame.sequence
        self._credit -= frame.size
        self._on_the_way += frame.size
        self.n_resent += frame.sequence <= self._newest
        self._newest = max(self._newest, frame.sequence)
        self._n_since_state += 1
        is_loaded = len(frame.messages) > 1 or self._n_since_state >= _ASK_AFTER
        frame.asks = bool(self._hold_bytes) and is_loaded and not self._has_asked
        self._has_asked = self._has_asked or frame.asks
        return frame

    def take_ask(self) -> bool:
        """Return whether to ask the peer for its state now, behind the frames that were sent.

        It is asked if a message was refused or a frame has to wait, or nothing may follow, and once
        after each frame, because it also answers when it has taken everything. After a refusal it
        is only asked if it would not send its state by itself when it has all frames.
        """
        if self._credit is None or self._asked_after == self._sent:
            return False
        is_last = self.is_draining and bool(self._frames) and self._fits_next() is None
        is_full = self._is_refusing and self._on_the_way < _due_bytes(
            self._capacity, self._max_bytes
        )
        if not (self.is_blocked or is_last or is_full):
            return False
        self._asked_after = self._sent
        return True

    def on_state(self, state: InboxState) -> None:
        """Process the peer's state.

        Raises:
            FrameError: if no peer that follows the protocol can have sent it.
        """
        last = self._made if self._credit is None else self._sent
        if not self._acknowledged <= state.acknowledged <= state.accepted <= last:
            raise FrameError(
                f"the peer acknowledges frames up to {state.acknowledged} and has those up to "
                f"{state.accepted}, but {self._acknowledged} was acknowledged before and {last} "
                "was sent; the peer does not follow the protocol, check that all hosts have the "
                "same version of dmiddleware"
            )
        while self._frames and self._frames[0].sequence <= state.acknowledged:
            self.n_bytes -= self._frames.popleft().size
        self._acknowledged = state.acknowledged
        if self._credit is None:
            self._sent, self._asked_after = state.accepted, None
        self._n_since_state, self._has_asked = 0, False
        self._on_the_way = sum(
            f.size for f in self._frames if state.accepted < f.sequence <= self._sent
        )
        self._credit = state.credit - self._on_the_way

    def on_connect(self, capacity: int) -> None:
        """Start over with the same process; nothing is sent before its state arrives.

        Args:
            capacity: the credit of its inbox when that is empty.
        """
        self._credit, self._capacity = None, capacity
        self._n_since_state, self._has_asked = 0, False

    def on_new_peer(self) -> None:
        """Start over with another process under the same node id.

        Messages that the old one had not acknowledged are numbered from 1 again. Messages that it
        had acknowledged are lost with it.
        """
        self._waiting.extendleft(m for f in reversed(self._frames) for m in reversed(f.messages))
        self._waiting_bytes = self.n_bytes
        self._frames.clear()
        self._acknowledged = self._sent = self._made = self._newest = 0
        self._credit = None

    def give_up(self) -> None:
        """Drop everything that was not acknowledged.

        Frames are emptied but keep their numbers, so that a peer that comes back after all sees no
        gap.
        """
        self._waiting.clear()
        self._waiting_bytes = 0
        self._is_refusing = False
        for frame in self._frames:
            frame.messages, frame.size = (), 0
        self.n_bytes = 0

    def unacknowledged(self) -> list[T]:
        """Return, in order, the messages that would be lost if the outbox were dropped now."""
        return [*(m for frame in self._frames for m in frame.messages), *self._waiting]

    def _fits_next(self) -> bool | None:
        """Return whether the peer takes the next frame, or its first message; None: there is none.

        Its credit is whole only if the inbox is empty, and nothing is on its way.
        """
        if self._sent < self._made:
            size = self._frames[self._sent - self._made].size
        elif self._waiting:
            size = self._waiting[0].size
        else:
            return None
        credit = self._credit
        return credit is not None and (size <= credit or credit >= self._capacity)


class Inbox(Generic[T]):
    """The receiver's side of one stream of messages.

    Args:
        max_bytes: how many bytes may wait to be taken. One frame may be larger.
        max_unhandled: how many messages may be taken and not yet handled; a frame is acknowledged
            once :meth:`on_handled` was called for each of its messages. None: no limit; a frame is
            acknowledged once it is accepted.
        peer_bytes: how many unacknowledged bytes the sender keeps, which it has announced; None: as
            many as this inbox.

    Attributes:
        accepted: the newest frame that was accepted, with all before it; 0: none.
        acknowledged: the same for frames that are acknowledged.
        n_bytes: bytes that are accepted and not yet taken.
        is_due: whether the state should be sent now, rather than with the next heartbeat.
        has_news: whether the state has changed since :meth:`take_state`, or may not have arrived.
    """

    def __init__(
        self, max_bytes: int, *, max_unhandled: int | None = None, peer_bytes: int | None = None
    ) -> None:
        self.accepted = 0
        self.acknowledged = 0
        self._max_bytes = max_bytes
        self._max_unhandled = max_unhandled
        self._due_bytes = _due_bytes(max_bytes, peer_bytes or max_bytes)
        self._ready: deque[T] = deque()
        self.n_bytes = 0
        # The frames with unhandled messages, each with how many those are.
        self._unhandled: deque[list[int]] = deque()
        self._n_taken = 0
        # Since the last state: how many bytes were accepted, and how many were taken.
        self._n_added = self._n_removed = 0
        self.is_due = False
        self.has_news = True
        self._is_asked = False

    def __len__(self) -> int:
        return len(self._ready)

    @property
    def waiting(self) -> Iterator[T]:
        """The messages that are accepted and not yet taken."""
        return iter(self._ready)

    @property
    def has_ready(self) -> bool:
        """Whether messages can be taken."""
        return bool(self._ready) and (self._max_unhandled is None or self._room > 0)

    @property
    def _room(self) -> int:
        """How many more messages that must be handled may be taken."""
        limit = self._max_unhandled or 0
        # After the limit was reached, half of the messages are handled before more are taken.
        return limit - self._n_taken if self._n_taken <= limit // 2 else 0

    def on_frame(self, sequence: int, messages: Sequence[T]) -> None:
        """Accept a frame.

        Raises:
            FrameError: if it is not the next one, or more than the credit allows.
        """
        size = sum(message.size for message in messages)
        if sequence != self.accepted + 1:
            raise FrameError(
                f"got frame {sequence} after frame {self.accepted}; the peer does not follow the "
                "protocol, check that all hosts have the same version of dmiddleware"
            )
        if self.n_bytes and self.n_bytes + size > self._max_bytes:
            raise FrameError(
                f"got a frame with {size} bytes, but this node takes at most "
                f"{self._max_bytes - self.n_bytes} more; the peer does not follow the protocol"
            )
        self.accepted = sequence
        self.has_news = True
        self._ready.extend(messages)
        self._move(size)
        if self._max_unhandled is None:
            self.acknowledged = sequence
        else:
            self._unhandled.append([sequence, len(messages)])
            self._acknowledge_handled()

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
                no limit.
            holds: whether a message stays here, with those after it; None: none does.
        """
        messages: list[T] = []
        size = 0
        if self._max_unhandled is not None:
            n = self._room if n is None else min(n, self._room)
        while self._ready and (n is None or len(messages) < n):
            message = self._ready[0]
            if holds is not None and holds(message):
                break
            if messages and max_bytes is not None and size + message.size > max_bytes:
                break
            messages.append(self._ready.popleft())
            size += message.size
        if self._max_unhandled is not None:
            self._n_taken += len(messages)
        self._move(-size)
        return messages

    def take_out(self, matches: Callable[[T], bool]) -> list[T]:
        """Remove and return messages that need not wait for those before them.

        Not for an inbox whose messages are acknowledged when handled.
        """
        matching = [message for message in self._ready if matches(message)]
        if matching:
            self._ready = deque(message for message in self._ready if not matches(message))
            self._move(-sum(message.size for message in matching))
        return matching

    def on_handled(self) -> None:
        """Note that the oldest message that was taken has been handled."""
        self._n_taken -= 1
        self._unhandled[0][1] -= 1
        before = self.acknowledged
        self._acknowledge_handled()
        if self.acknowledged != before:
            # Its sender may wait for nothing else.
            self.is_due = self.has_news = True

    def on_ask(self, *, until_empty: bool = True) -> None:
        """Note that the sender wants to know the state now.

        Args:
            until_empty: whether it also wants to know it when the inbox is empty.
        """
        self.is_due = True
        self._is_asked = self._is_asked or until_empty

    def take_state(self) -> InboxState:
        """Return the state, which is sent now."""
        self.is_due, self._n_added, self._n_removed = False, 0, 0
        self.has_news = False
        self._is_asked = self._is_asked and bool(self.n_bytes)
        return InboxState(self.acknowledged, self.accepted, max(0, self._max_bytes - self.n_bytes))

    def _move(self, n_bytes: int) -> None:
        """Count bytes that were added, or removed if their number is negative."""
        if not n_bytes:
            return
        self.n_bytes += n_bytes
        self.has_news = True
        if n_bytes > 0:
            self._n_added += n_bytes
        else:
            self._n_removed -= n_bytes
        if (
            self._n_added >= self._due_bytes
            or self._n_removed >= self._due_bytes
            or (self._is_asked and not self.n_bytes)
        ):
            self.is_due = True

    def _acknowledge_handled(self) -> None:
        while self._unhandled and not self._unhandled[0][1]:
            self.acknowledged = self._unhandled.popleft()[0]
