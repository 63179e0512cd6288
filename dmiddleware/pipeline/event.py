"""Events, their delivery contracts, and the queue that keeps them. Pure: no thread, no clock."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, get_args

from dmiddleware.errors import EventError

__all__ = ["Delivery", "Event", "Emission", "EventCounters", "Handler", "Letter", "Mailbox"]

Delivery = Literal["reliable", "latest", "lossy"]
"""How hard an event's arrival is insisted on; see :class:`Event`."""
"""What becomes of an event that comes faster than it is handled; see :class:`Event`."""

_GLOB_CHARACTERS = frozenset("*?[")


@dataclass(frozen=True, slots=True)
class Event:
    """An event's name and its delivery contract.

    A plain string in place of an event means the contract declared for that name, or a reliable
    one.

    Args:
        name: the event; without the glob characters ``*?[``.
        delivery: ``"reliable"``: all arrive, in order, and a full queue makes the emitter wait;
            ``"latest"``: one that is not yet handled is replaced by the next, since only the newest
            matters; ``"lossy"``: dropped, and counted, when the queue is full.
        capacity: how many may wait in the queue.
        timeout_s: how many seconds an emitter waits at a full queue.

    Raises:
        EventError: for an impossible value.
    """

    name: str
    delivery: Delivery = "reliable"
    capacity: int = 1024
    timeout_s: float = 30.0

    def __post_init__(self) -> None:
        if not self.name or _GLOB_CHARACTERS.intersection(self.name):
            raise EventError(
                f"an event's name is not empty and has none of the characters *?[, got "
                f"{self.name!r}; patterns are for off() only"
            )
        if self.delivery not in get_args(Delivery):
            raise EventError(
                f"event {self.name!r}: delivery must be one of {', '.join(get_args(Delivery))}, "
                f"got {self.delivery!r}"
            )
        if self.capacity < 1 or self.timeout_s < 0:
            raise EventError(
                f"event {self.name!r}: capacity must be at least 1 and timeout_s at least 0, got "
                f"{self.capacity} and {self.timeout_s}"
            )


class Emission(NamedTuple):
    """What an event was emitted with.

    Attributes:
        args: the positional arguments.
        kwargs: the keyword arguments.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


@dataclass(slots=True)
class EventCounters:
    """What became of the emissions of one event that someone listened to.

    Attributes:
        emitted: accepted or dropped.
        handled: given to the handlers.
        dropped: not queued, since the queue was full (lossy events).
        replaced: by a newer one before they were handled (latest events).
        failed: handler calls that raised.
        waiting: in the queue now.
    """

    emitted: int = 0
    handled: int = 0
    dropped: int = 0
    replaced: int = 0
    failed: int = 0
    waiting: int = 0


class Handler:
    """One registration of a function for an event.

    Args:
        function: called with the emission's arguments.
        once: whether it is for one emission only.
    """

    __slots__ = ("active", "function", "once")

    def __init__(self, function: Callable[..., object], *, once: bool) -> None:
        self.function = function
        self.once = once
        self.active = True


@dataclass(slots=True)
class Letter:
    """One emission on its way.

    Attributes:
        event: its event.
        emission: its arguments.
        handlers: who listened when it was emitted, in order of registration.
    """

    event: Event
    emission: Emission
    handlers: tuple[Handler, ...] = field(default=(), repr=False)


class Mailbox:
    """A queue of letters in the order of their emission, each event bounded on its own."""

    def __init__(self) -> None:
        self._letters: deque[Letter] = deque()
        self._newest: dict[str, Letter] = {}
        self.counters: dict[str, EventCounters] = {}

    def __len__(self) -> int:
        return len(self._letters)

    def offer(self, letter: Letter, *, reserve: bool = False) -> bool:
        """Queue a letter.

        Args:
            letter: what to queue.
            reserve: allow twice the event's capacity; for those who empty the queue, and cannot
                wait for themselves.

        Returns:
            False if there is no room for a reliable letter; True if the letter was dealt with as
            its contract says.
        """
        event = letter.event
        counters = self.counters.setdefault(event.name, EventCounters())
        if event.delivery == "latest":
            self._offer_latest(letter, counters)
        elif counters.waiting < event.capacity * (2 if reserve else 1):
            self._append(letter, counters)
        elif event.delivery == "lossy":
            counters.dropped += 1
        else:
            return False
        counters.emitted += 1
        return True

    def take(self) -> Letter | None:
        """Return the oldest letter, or None if there is none."""
        if not self._letters:
            return None
        letter = self._letters.popleft()
        name = letter.event.name
        if self._newest.get(name) is letter:
            del self._newest[name]
        self.counters[name].waiting -= 1
        return letter

    def waiting(self) -> dict[str, int]:
        """Return how many letters of each event wait."""
        return {name: c.waiting for name, c in self.counters.items() if c.waiting}

    def _append(self, letter: Letter, counters: EventCounters) -> None:
        self._letters.append(letter)
        counters.waiting += 1

    def _offer_latest(self, letter: Letter, counters: EventCounters) -> None:
        waiting = self._newest.get(letter.event.name)
        if waiting is None:
            self._newest[letter.event.name] = letter
            self._append(letter, counters)
        else:
            # In the older one's place: a steady stream must not put off its own delivery.
            waiting.emission, waiting.handlers = letter.emission, letter.handlers
            counters.replaced += 1
