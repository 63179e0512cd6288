"""What came from one peer: reliable events in order, versions that only rise, lossy events once."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from dmiddleware.errors import FrameError
from dmiddleware.router.protocol.delivery import Inbox, Verdict
from dmiddleware.router.protocol.outgoing import LATEST, LOSSY, RELIABLE
from dmiddleware.router.wire.envelope import EncodedEvent

__all__ = ["Incoming"]


@dataclass(slots=True)
class IncomingCounters:
    """What was received and not delivered, on purpose."""

    superseded: int = 0
    dropped: int = 0
    duplicates: int = 0


class Incoming:
    """Everything that came from one peer and was not yet taken.

    Args:
        max_bytes: bound of reliable events.
        window: how many reliable frames the peer may have under way.
        max_lossy: how many lossy events wait at most; the oldest make room, counted.
    """

    def __init__(self, *, max_bytes: int, window: int, max_lossy: int = 1024) -> None:
        self.inbox: Inbox[EncodedEvent] = Inbox(max_bytes, window)
        self.counters = IncomingCounters()
        self._latest: dict[str, EncodedEvent] = {}
        self._lossy: deque[EncodedEvent] = deque()
        self._max_lossy = max_lossy
        self._seen = {LATEST: 0, LOSSY: 0}

    @property
    def credit(self) -> int:
        """How many more bytes of reliable events are accepted."""
        return self.inbox.credit

    @property
    def waiting(self) -> bool:
        """Whether there is something to take."""
        return bool(self._latest or self._lossy or len(self.inbox))

    def on_events(self, stream: int, sequence: int, events: Sequence[EncodedEvent]) -> Verdict:
        """Take the events of a frame in.

        Raises:
            FrameError: for a stream or a number that no peer can have sent.
        """
        if stream == RELIABLE:
            return self.inbox.on_frame(sequence, events)
        if stream not in self._seen:
            raise FrameError(f"there is no stream {stream}; the peer speaks otherwise")
        if sequence <= self._seen[stream]:
            self.counters.duplicates += 1
            return Verdict.DUPLICATE
        self._seen[stream] = sequence
        if stream == LATEST:
            self._take_latest(events)
        else:
            self._take_lossy(events)
        return Verdict.ACCEPTED

    def take(self, n: int, *, max_bytes: int | None = None) -> list[EncodedEvent]:
        """Remove and return up to ``n`` events, the latest first, then reliable, then lossy.

        Args:
            n: how many at most.
            max_bytes: bound of the reliable ones among them, of which one comes in any case.
        """
        taken = list(self._latest.values())
        self._latest = {}
        taken += self.inbox.take(max(0, n - len(taken)), max_bytes=max_bytes)
        while self._lossy and len(taken) < n:
            taken.append(self._lossy.popleft())
        return taken

    def _take_latest(self, events: Sequence[EncodedEvent]) -> None:
        for event in events:
            self.counters.superseded += event.event in self._latest
            self._latest[event.event] = event

    def _take_lossy(self, events: Sequence[EncodedEvent]) -> None:
        self._lossy.extend(events)
        while len(self._lossy) > self._max_lossy:
            self._lossy.popleft()
            self.counters.dropped += 1
