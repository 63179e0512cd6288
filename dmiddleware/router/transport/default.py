"""The default transport: Unix-domain sockets on one host, nng between hosts."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from dmiddleware.router.transport.interface import (
    Channel,
    Listener,
    ListenLimits,
    RequestHandler,
    Transport,
)
from dmiddleware.router.transport.nng import NngTransport
from dmiddleware.router.transport.tls import TlsFiles
from dmiddleware.router.transport.unix import UnixTransport

__all__ = ["SocketTransport"]


class SocketTransport:
    """Plain Unix-domain sockets for ``ipc`` addresses, nng for ``tcp`` and ``tls+tcp``.

    On one host nng takes four times as long for a request and its reply. On systems other than
    Linux it is used there too.

    Args:
        tls: certificates for ``tls+tcp`` addresses; None: such addresses are refused.
    """

    def __init__(self, *, tls: TlsFiles | None = None) -> None:
        self._nng: Transport = NngTransport(tls=tls)
        self._local: Transport = UnixTransport() if sys.platform == "linux" else self._nng

    def listen(
        self,
        address: str,
        serve: RequestHandler,
        *,
        on_disconnect: Callable[[int], None],
        limits: ListenLimits,
    ) -> Listener:
        """Listen on an address; see :class:`~dmiddleware.router.transport.interface.Transport`."""
        return self._for(address).listen(address, serve, on_disconnect=on_disconnect, limits=limits)

    def dial(
        self,
        address: str,
        *,
        connect_timeout_s: float,
        reply_timeout_s: float,
        max_frame_bytes: int,
    ) -> Channel:
        """Connect to an address; see :class:`~dmiddleware.router.transport.interface.Transport`."""
        return self._for(address).dial(
            address,
            connect_timeout_s=connect_timeout_s,
            reply_timeout_s=reply_timeout_s,
            max_frame_bytes=max_frame_bytes,
        )

    def covers_body(self, address: str) -> bool:
        """Return whether frames need a MAC over all their bytes: on plain tcp only."""
        return self._for(address).covers_body(address)

    def stage_arrays(self, arrays: Sequence[memoryview]) -> None:
        """Return None: arrays cannot be staged."""

    def _for(self, address: str) -> Transport:
        return self._local if address.startswith("ipc://") else self._nng
