"""The task as the middleware of its chain see it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol

from dmiddleware.pipeline.clock import Clock
from dmiddleware.pipeline.event import Emission, Event
from dmiddleware.pipeline.event_bus import EventBus, EventRouter

__all__ = ["OpenLayer", "RunningTask"]


class OpenLayer(AbstractContextManager[Any], Protocol):
    """A middleware called by hand, whose way forward has run and whose way back has not."""

    def back(self) -> None:
        """Run the way back; may be called twice."""
        ...


class RunningTask(Protocol):
    """What the middleware of a chain can ask of the task that runs them, through ``ctx.task``.

    :class:`~dmiddleware.pipeline.Task` implements it, and says more about each method.
    """

    events: EventBus
    router: EventRouter | None
    clock: Clock
    rank: int

    @property
    def finish(self) -> bool:
        """Whether the task was asked to stop."""
        ...

    @property
    def in_last_step(self) -> bool:
        """Whether this is a step after the stop."""
        ...

    def part(self, name: str) -> RunningTask:
        """Return the task as the middleware of a named part see it."""
        ...

    def has_role(self, role: str) -> bool:
        """Return whether this process has the role."""
        ...

    def roles_for(self, *roles: str) -> tuple[str, ...]:
        """Return the roles of the processes in which middleware with one of these roles run."""
        ...

    def participants(self, *roles: str) -> list[int]:
        """Return the node ids of the connected peers that the task can wait for."""
        ...

    def seed_for(self, *scope: str | int) -> int:
        """Derive the seed of one random generator from the run's seed."""
        ...

    def stop(
        self, reason: str, *, ok: bool = True, only_local: bool = False, final: bool = True
    ) -> None:
        """End the run when the current step is done."""
        ...

    def at_step_end(self, function: Callable[[], object]) -> None:
        """Call a function once, between the current step and the next."""
        ...

    def on(self, event: str | Event, function: Callable[..., object]) -> None:
        """Call the function for every emission of the event from now on."""
        ...

    def emit(
        self,
        event: str | Event,
        *args: Any,
        only_local: bool = False,
        only_remote: bool = False,
        to: int | Collection[int] | None = None,
        **kwargs: Any,
    ) -> None:
        """Emit an event."""
        ...

    def wait_for(self, event: str | Event, timeout_s: float) -> Emission:
        """Wait for the next emission of the event."""
        ...

    def wrap(self, mw: Callable[[Any], Iterator[None] | None]) -> Callable[[Any], OpenLayer]:
        """Return a middleware in a form that another middleware can call."""
        ...

    def forward(self, mw: Callable[[Any], Iterator[None] | None]) -> OpenLayer:
        """Run the way forward of one middleware by hand, on the task's context."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the context and of every middleware that has one."""
        ...
