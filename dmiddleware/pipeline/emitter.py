"""The part of a task that speaks with its event bus."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dmiddleware.pipeline.event import Emission, Event
from dmiddleware.pipeline.event_bus import EventBus

__all__ = ["Emitter"]


class Emitter:
    """Gives an object the methods of its event bus.

    Attributes:
        events: the bus.
    """

    events: EventBus

    def on(self, event: str | Event, function: Callable[..., object]) -> None:
        """Call the function for every emission of the event from now on.

        Handlers run one at a time, in the order of the emissions, on a thread of their own. What
        one raises is raised by :meth:`run` at the end of the step.
        """
        self.events.on(event, function)

    def once(self, event: str | Event, function: Callable[..., object]) -> None:
        """Call the function for the next emission of the event only."""
        self.events.once(event, function)

    def off(self, event: str | Event, function: Callable[..., object] | None = None) -> int:
        """Call functions no more; see :meth:`EventBus.off`. Glob patterns are allowed.

        Returns:
            How many registrations were removed.
        """
        return self.events.off(event, function)

    def emit(
        self,
        event: str | Event,
        *args: Any,
        only_local: bool = False,
        only_remote: bool = False,
        **kwargs: Any,
    ) -> None:
        """Tell all who listen to the event; see :meth:`EventBus.emit`.

        Raises:
            EventQueueFull: when the queue stayed full past the event's deadline.
        """
        self.events.emit(event, *args, only_local=only_local, only_remote=only_remote, **kwargs)

    def wait_for(self, event: str | Event, timeout_s: float) -> Emission:
        """Wait for the next emission of the event.

        Returns:
            What it was emitted with, as ``(args, kwargs)``.

        Raises:
            WaitTimeout: when it does not come in time.
        """
        return self.events.wait_for(event, timeout_s=timeout_s)
