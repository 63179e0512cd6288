"""The sockets that a router uses of itself: plain ones on one host, nng's between hosts."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from dmiddleware.router.transport.interface import Channel, Listener, RequestHandler, Transport
from dmiddleware.router.transport.nng import NngTransport
from dmiddleware.router.transport.tls import TlsFiles
from dmiddleware.router.transport.unix import UnixTransport

__all__ = ["SocketTransport"]


class SocketTransport:
    """Plain Unix-domain sockets for ``ipc`` addresses, nng for ``tcp`` and ``tls+tcp``.

    On one host nng takes four times as long for a request and its answer. It is used there too
    where the system is not Linux.

    Args:
        tls: certificates for ``tls+tcp`` addresses; None: such addresses are refused.
    """

    def __init__(self, *, tls: TlsFiles | None = None) -> None:
        self._far: Transport = NngTransport(tls=tls)
        self._near: Transport = UnixTransport() if sys.platform == "linux" else self._far

    def listen(
        self,
        address: str,
        serve: RequestHandler,
        *,
        on_disconnect: Callable[[int], None],
        max_frame_bytes: int,
    ) -> Listener:
        """Listen on an address; see :class:`~dmiddleware.router.transport.interface.Transport`."""
        return self._of(address).listen(
            address, serve, on_disconnect=on_disconnect, max_frame_bytes=max_frame_bytes
        )

    def dial(
        self,
        address: str,
        *,
        connect_timeout_s: float,
        reply_timeout_s: float,
        max_frame_bytes: int,
    ) -> Channel:
        """Connect to an address; see :class:`~dmiddleware.router.transport.interface.Transport`."""
        return self._of(address).dial(
            address,
            connect_timeout_s=connect_timeout_s,
            reply_timeout_s=reply_timeout_s,
            max_frame_bytes=max_frame_bytes,
        )

    def covers_body(self, address: str) -> bool:
        """Tell whether frames need all their bytes signed: on bare tcp only."""
        return self._of(address).covers_body(address)

    def stage_arrays(self, arrays: Sequence[memoryview]) -> None:
        """Tell that arrays have no place of their own here."""

    def _of(self, address: str) -> Transport:
        return self._near if address.startswith("ipc://") else self._far
