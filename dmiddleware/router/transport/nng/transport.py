"""The nng transport."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dmiddleware.errors import TransportError
from dmiddleware.router.transport.interface import ListenLimits, RequestHandler
from dmiddleware.router.transport.nng.channel import NngChannel
from dmiddleware.router.transport.nng.listener import NngListener
from dmiddleware.router.transport.tls import TlsFiles

__all__ = ["NngTransport"]


class NngTransport:
    """nng's request and reply sockets.

    nng accepts connections without a limit, and closes silent ones after ten seconds only, so
    strangers should not be able to reach its listeners. See docs/decisions/nng.md.

    Args:
        tls: certificates for ``tls+tcp`` addresses; None: such addresses are refused.
    """

    def __init__(self, *, tls: TlsFiles | None = None) -> None:
        self._tls = tls

    def listen(
        self,
        address: str,
        serve: RequestHandler,
        *,
        on_disconnect: Callable[[int], None],
        limits: ListenLimits,
    ) -> NngListener:
        """Listen on an address; see :class:`~dmiddleware.router.transport.interface.Transport`."""
        return NngListener(
            address, serve, on_disconnect=on_disconnect, limits=limits, tls=self._tls_for(address)
        )

    def dial(
        self,
        address: str,
        *,
        connect_timeout_s: float,
        reply_timeout_s: float,
        max_frame_bytes: int,
    ) -> NngChannel:
        """Connect to an address; see :class:`~dmiddleware.router.transport.interface.Transport`."""
        return NngChannel(
            address,
            connect_timeout_s=connect_timeout_s,
            reply_timeout_s=reply_timeout_s,
            max_frame_bytes=max_frame_bytes,
            tls=self._tls_for(address),
        )

    def covers_body(self, address: str) -> bool:
        """Return whether frames need a MAC over all their bytes: on plain tcp only."""
        return address.startswith("tcp://")

    def stage_arrays(self, arrays: Sequence[memoryview]) -> None:
        """Return None: arrays cannot be staged."""

    def _tls_for(self, address: str) -> TlsFiles | None:
        if not address.startswith("tls+tcp://"):
            return None
        if self._tls is None:
            raise TransportError(
                f"{address} needs certificates; pass tls=TlsFiles(…) to the transport"
            )
        return self._tls
