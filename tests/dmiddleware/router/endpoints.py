"""Addresses and transports for tests that run over every transport."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dmiddleware.errors import TransportError
from dmiddleware.router.transport import Channel, Listener, ListenLimits, RequestHandler, Transport

__all__ = ["DEADLINE_S", "MAX_BYTES", "NEVER_S", "BackgroundRequest", "Endpoints", "unlimited"]

MAX_BYTES = 1 << 20
DEADLINE_S = 20.0

NEVER_S = 600.0
"""A deadline that is never reached: whatever ends earlier has another reason."""


def unlimited(max_frame_bytes: int) -> ListenLimits:
    """Return limits that do not depend on trust."""
    return ListenLimits(
        max_frame_bytes=max_frame_bytes,
        max_untrusted_frame_bytes=max_frame_bytes,
        max_untrusted_requests=1_000_000,
        handshake_s=NEVER_S,
        max_untrusted=10_000,
    )


@dataclass
class Endpoints:
    """An address, the transport to listen with, and the transport to dial with."""

    address: str
    listens: Transport
    dials: Transport

    def listen(
        self,
        serve: RequestHandler,
        on_disconnect: Callable[[int], None] = lambda _: None,
        address: str = "",
    ) -> contextlib.closing[Listener]:
        return contextlib.closing(
            self.listens.listen(
                address or self.address,
                serve,
                on_disconnect=on_disconnect,
                limits=unlimited(MAX_BYTES),
            )
        )

    def dial(self, listener: Listener, **options: float) -> contextlib.closing[Channel]:
        times: dict[str, Any] = {
            "connect_timeout_s": DEADLINE_S,
            "reply_timeout_s": DEADLINE_S,
        } | options
        return contextlib.closing(
            self.dials.dial(listener.address, max_frame_bytes=MAX_BYTES, **times)
        )


class BackgroundRequest:
    """Makes a request in a separate thread."""

    def __init__(self, channel: Channel, content: bytes) -> None:
        self._result: bytes | TransportError | None = None
        self._thread = threading.Thread(target=self._ask, args=(channel, content), daemon=True)
        self._thread.start()

    def _ask(self, channel: Channel, content: bytes) -> None:
        try:
            self._result = bytes(channel.request(content))
        except TransportError as error:
            self._result = error

    def result(self) -> bytes | TransportError | None:
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive()
        return self._result
