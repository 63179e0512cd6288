"""A router that loses messages, to show that the ledgers reveal it.

Its events go over a Bus0 socket, whose queues drop messages silently, and count as delivered at
once. Everything else (handshake, heartbeats, subscriptions) uses the real router.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Collection
from typing import Any

import msgspec
import numpy as np
import pynng

from dmiddleware.pipeline import Event
from dmiddleware.pipeline.event_bus import Accept
from dmiddleware.router import Router

__all__ = ["BusRouter"]


def _bus_address(address: str) -> str:
    if address.startswith("ipc://"):
        return address + ".bus"
    host, _, port = address.rpartition(":")
    return f"{host}:{int(port) + 1}"


class BusRouter(Router):
    """Sends events over Bus0 instead of connections that acknowledge them."""

    def __init__(self, *, listen: str = "", dial: Collection[str] = (), **options: Any) -> None:
        super().__init__(listen=listen, dial=tuple(dial), **options)
        addresses = {"listen": _bus_address(listen)} if listen else {}
        if dial:
            addresses["dial"] = _bus_address(next(iter(dial)))
        self._bus = pynng.Bus0(**addresses, recv_timeout=200, block_on_dial=False)
        self._bus.recv_max_size = 0
        self._is_over = False
        self._thread = threading.Thread(target=self._receive, name="bus", daemon=True)

    def attach(self, accept: Accept) -> None:
        self._accept = accept
        super().attach(accept)
        self._thread.start()

    def emit(
        self,
        event: Event,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        to: Collection[int] | None = None,
    ) -> None:
        *others, payload = args
        self._bus.send(msgspec.msgpack.encode((event.name, others, payload.tobytes())))

    def close(self, *, deadline_s: float = 5.0, goodbye: bool = True) -> dict[int, int]:
        if not self._is_over:
            self._is_over = True
            self._thread.join(5.0)
            self._bus.close()
        return super().close(deadline_s=deadline_s, goodbye=goodbye)

    def _receive(self) -> None:
        while not self._is_over:
            with contextlib.suppress(pynng.Timeout):
                name, others, payload = msgspec.msgpack.decode(self._bus.recv())
                self._accept(name, (*others, np.frombuffer(payload, np.uint8)), {}, None, True)
