"""``ding.framework.EventLoop``: events within a process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from dmiddleware.pipeline.event_bus import EventBus, EventRouter

__all__ = ["EventLoop"]


class EventLoop:
    """Calls handlers of events, on a thread of its own, in the order of the events.

    Args:
        name: names the loop in messages.
        router: carries events from and to other processes.
    """

    loops: ClassVar[dict[str, EventLoop]] = {}

    def __init__(self, name: str = "default", router: EventRouter | None = None) -> None:
        self._name = name
        self._bus = EventBus(name=name, router=router)
        self._first_error: BaseException | None = None

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
        """Call the handlers of an event.

        Raises:
            BaseException: the error of an earlier handler, after which there are no more events.
        """
        if self._exception is not None:
            raise self._exception
        self._bus.emit(event, *args, **kwargs)

    @property
    def _exception(self) -> BaseException | None:
        self._first_error = next(iter([*self._bus.take_errors()]), self._first_error)
        return self._first_error

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
