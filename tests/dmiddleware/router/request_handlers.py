"""Request handlers for tests of transports."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

from dmiddleware.router.transport import Reply, RequestHandler
from dmiddleware.router.wire.byte_pieces import WireBytes

__all__ = ["Parking", "answering", "at_once", "echo"]

_DEADLINE_S = 20.0


def answering(function: Callable[[memoryview, int], WireBytes | None]) -> RequestHandler:
    """Answer each request at once, with what a function of it and its connection returns."""

    def serve(raw: memoryview, connection: int, reply: Reply) -> None:
        reply(function(raw, connection))

    return serve


@answering
def echo(raw: memoryview, connection: int) -> bytes:
    """Answer each request with itself."""
    return bytes(raw)


def at_once(
    work: Callable[..., object], arguments: Iterable[tuple[object, ...]]
) -> list[threading.Thread]:
    """Do some work with each of the arguments, all at the same time; returns the threads."""
    threads = [threading.Thread(target=work, args=one) for one in arguments]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(_DEADLINE_S)
        assert not thread.is_alive()
    return threads


class Parking:
    """Takes requests and answers none of them; whoever wants to, answers them later."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._parked: list[tuple[bytes, Reply]] = []

    def __call__(self, raw: memoryview, connection: int, reply: Reply) -> None:
        with self._changed:
            self._parked.append((bytes(raw), reply))
            self._changed.notify_all()

    def wait_for(self, n: int) -> dict[bytes, Reply]:
        """Wait until so many requests have come, and return them with what answers them."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self._parked) >= n, _DEADLINE_S)
            return dict(self._parked)
