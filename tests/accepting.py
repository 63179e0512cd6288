"""What a router calls for each event that arrives, from a function of name and arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dmiddleware.pipeline.event_bus import Accept, Done

__all__ = ["accepting"]


def accepting(deliver: Callable[..., object], *, waits: bool = False) -> Accept:
    """Return an acceptor of events, which count as handled when a function has returned.

    Args:
        deliver: called with the event's name and arguments; returns False if the queue is full.
        waits: whether it is called only where it may wait.
    """

    def accept(
        name: str, args: tuple[Any, ...], kwargs: dict[str, Any], done: Done | None, may_wait: bool
    ) -> bool:
        if (waits and not may_wait) or deliver(name, args, kwargs) is False:
            return False
        if done is not None:
            done(True)
        return True

    return accept
