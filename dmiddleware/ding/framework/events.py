"""``ding.framework.EventLoop``: events within a process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from dmiddleware.pipeline.event_bus import EventBus

__all__ = ["EventLoop"]


class EventLoop:
    """Calls handlers of events, on a thread of its own, in the order of the events.

    Args:
        name: names the loop in messages.
    """

    loops: ClassVar[dict[str, EventLoop]] = {}

    def __init__(self, name: str = "default") -> None:
        self._name = name
        self._bus = EventBus(name=name)

    def on(self, event: str, fn: Callable[..., Any]) -> None:
        """Call a function at each event."""
        self._bus.on(event, fn)

    def once(self, event: str, fn: Callable[..., Any]) -> None:
        """Call a function at the next event."""
        self._bus.once(event, fn)

    def off(self, event: str, fn: Callable[..., Any] | None = None) -> None:
        """Call a function, or all, no longer."""
        self._bus.off(event, fn)

    def emit(self, event: str, *args: Any, **kwargs: Any) -> None:
        """Call the handlers of an event."""
        self._bus.emit(event, *args, **kwargs)

    @classmethod
    def get_event_loop(cls, name: str = "default") -> EventLoop:
        """Return the loop of a name, which is made if it is missing."""
        if name not in cls.loops:
            cls.loops[name] = cls(name)
        return cls.loops[name]

    def stop(self) -> None:
        """End the thread."""
        self._bus.close()
        EventLoop.loops.pop(self._name, None)
