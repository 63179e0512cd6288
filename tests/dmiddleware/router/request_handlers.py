"""Request handlers for tests of transports."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

from dmiddleware.router.transport import Reply, RequestHandler
from dmiddleware.router.wire.byte_pieces import WireBytes

__all__ = ["Parking", "replying_with", "in_threads", "echo"]

_DEADLINE_S = 20.0


def replying_with(function: Callable[[memoryview, int], WireBytes | None]) -> RequestHandler:
    """Reply to each request at once with the result of a function of it and its connection."""

    def serve(raw: memoryview, connection: int, reply: Reply) -> None:
        reply(function(raw, connection))

    return serve


@replying_with
def echo(raw: memoryview, connection: int) -> bytes:
    """Reply to each request with the request."""
    return bytes(raw)


def in_threads(
    work: Callable[..., object], arguments: Iterable[tuple[object, ...]]
) -> list[threading.Thread]:
    """Call a function with each of the arguments in a separate thread; return the threads."""
    threads = [threading.Thread(target=work, args=one) for one in arguments]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(_DEADLINE_S)
        assert not thread.is_alive()
    return threads


class Parking:
    """Parks all requests; the test replies to them later."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._parked: list[tuple[bytes, Reply]] = []

    def __call__(self, raw: memoryview, connection: int, reply: Reply) -> None:
        with self._changed:
            self._parked.append((bytes(raw), reply))
            self._changed.notify_all()

    def wait_for(self, n: int) -> dict[bytes, Reply]:
        """Wait until ``n`` requests have arrived; return their replies by request."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self._parked) >= n, _DEADLINE_S)
            return dict(self._parked)
