"""Events, their delivery contracts, and the queue that stores them. Pure: no thread, no clock."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NamedTuple, get_args

from dmiddleware.errors import EventError
from dmiddleware.event_names import is_glob

__all__ = [
    "Acknowledged",
    "Delivery",
    "Event",
    "Emission",
    "EventCounters",
    "Handler",
    "QueuedEvent",
    "EventQueue",
]

Delivery = Literal["reliable", "latest", "lossy"]
"""What happens to an event that is emitted faster than it is handled; see :class:`Event`."""

Acknowledged = Literal["accepted", "handled"]
"""When a reliable event counts as delivered to another process; see :class:`Event`."""

_DELIVERIES: Final[tuple[str, ...]] = get_args(Delivery)
_ACKNOWLEDGED: Final[tuple[str, ...]] = get_args(Acknowledged)


@dataclass(frozen=True, slots=True)
class Event:
    """An event's name and its delivery contract.

    Wherever an event is expected, a plain string means the contract that was declared for that
    name, or a reliable one.

    Args:
        name: the event; must not contain the glob characters ``*?[``.
        delivery: ``"reliable"``: every emission arrives, in order, and a full queue makes the
            emitter wait; ``"latest"``: a newer emission replaces one that is still in the queue,
            since only the newest matters; ``"lossy"``: dropped, and counted, when the queue is
            full.
        capacity: how many emissions may wait in the queue.
        timeout_s: how many seconds an emitter waits for room in a full queue.
        acknowledged: when another process confirms a reliable event, after which its sender drops
            it: ``"accepted"``: when it is in that process's memory, so that a handler that runs
            long does not delay the next events; ``"handled"``: when its handlers have returned.
            If the process dies before, its successor receives the event.
        required: whether an emission of a reliable event that no handler receives is an error
            (:class:`~dmiddleware.errors.NoSubscriber`), and not only counted.

    Raises:
        EventError: for an invalid value.
    """

    name: str
    delivery: Delivery = "reliable"
    capacity: int = 1024
    timeout_s: float = 30.0
    acknowledged: Acknowledged = "accepted"
    required: bool = False

    def __post_init__(self) -> None:
        if not self.name or is_glob(self.name):
            raise EventError(
                f"an event's name must not be empty or contain any of *?[, got {self.name!r}; "
                "only off() takes patterns"
            )
        if self.delivery not in _DELIVERIES:
            raise EventError(
                f"event {self.name!r}: delivery must be one of {', '.join(_DELIVERIES)}, "
                f"got {self.delivery!r}"
            )
        if self.capacity < 1 or self.timeout_s < 0:
            raise EventError(
                f"event {self.name!r}: capacity must be at least 1 and timeout_s at least 0, got "
                f"{self.capacity} and {self.timeout_s}"
            )
        if self.acknowledged not in _ACKNOWLEDGED:
            raise EventError(
                f"event {self.name!r}: acknowledged must be one of {', '.join(_ACKNOWLEDGED)}, "
                f"got {self.acknowledged!r}"
            )
        if self.delivery != "reliable" and (self.acknowledged == "handled" or self.required):
            option = "required=True" if self.required else 'acknowledged="handled"'
            raise EventError(
                f"event {self.name!r}: {option} needs a reliable event, but its delivery is "
                f"{self.delivery!r}"
            )


class Emission(NamedTuple):
    """The arguments of one emission of an event.

    Attributes:
        args: the positional arguments.
        kwargs: the keyword arguments.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


@dataclass(slots=True)
class EventCounters:
    """Counters of the emissions of one event, from its first handler on.

    Attributes:
        emitted: accepted or dropped.
        handled: passed to the handlers.
        dropped: not queued because the queue was full (lossy events), or because they arrived from
            another process after the task was closed.
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


@dataclass(slots=True, eq=False)
class Handler:
    """One registration of a function for an event.

    Attributes:
        function: called with the emission's arguments.
        once: whether it is for one emission only.
        active: False: it was removed, also for emissions in the queue.
    """

    function: Callable[..., object]
    once: bool
    active: bool = True


@dataclass(slots=True)
class QueuedEvent:
    """One emission in the queue.

    Attributes:
        event: the event that was emitted.
        emission: its arguments.
        handlers: the handlers at the time of the emission, in order of registration.
        done: called with True when the handlers have returned; None: nothing is.
    """

    event: Event
    emission: Emission
    handlers: tuple[Handler, ...] = field(default=(), repr=False)
    done: Callable[[bool], None] | None = field(default=None, repr=False)


class EventQueue:
    """A queue of emissions in order, with a capacity for each event.

    Attributes:
        items: the emissions that wait.
        counters: of every event that was offered.
    """

    def __init__(self) -> None:
        self.items: deque[QueuedEvent] = deque()
        self._newest: dict[str, QueuedEvent] = {}
        self.counters: dict[str, EventCounters] = {}

    def offer(self, item: QueuedEvent, *, reserve: bool = False) -> bool:
        """Queue an emission.

        Args:
            item: the emission.
            reserve: allow twice the event's capacity; for handlers, which empty the queue and so
                cannot wait for room in it.

        Returns:
            False if a reliable event does not fit; True if the emission was queued, dropped or
            merged as its contract says.
        """
        event = item.event
        counters = self.counters.setdefault(event.name, EventCounters())
        is_latest = event.delivery == "latest"
        if is_latest and (queued := self._newest.get(event.name)) is not None:
            # It keeps its position in the queue, or a steady stream would delay itself forever.
            queued.emission, queued.handlers = item.emission, item.handlers
            counters.replaced += 1
        elif is_latest or counters.waiting < event.capacity * (2 if reserve else 1):
            self.items.append(item)
            counters.waiting += 1
            if is_latest:
                self._newest[event.name] = item
        elif event.delivery == "lossy":
            counters.dropped += 1
        else:
            return False
        counters.emitted += 1
        return True

    def take(self) -> QueuedEvent | None:
        """Remove and return the oldest emission, or None if the queue is empty."""
        if not self.items:
            return None
        item = self.items.popleft()
        name = item.event.name
        if self._newest.get(name) is item:
            del self._newest[name]
        self.counters[name].waiting -= 1
        return item

    def waiting(self) -> dict[str, int]:
        """Return the number of queued emissions of each event that has any."""
        return {name: c.waiting for name, c in self.counters.items() if c.waiting}
