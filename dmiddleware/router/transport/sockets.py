"""Requests and replies over plain sockets: ``ipc``, ``tcp`` and ``tls+tcp``.

A broken connection is not restored: the dialer has to dial again. The bytes of a request must not
change until its reply arrives, nor those of a reply until it is sent.
"""

from __future__ import annotations

import select
import threading
import time
from collections.abc import Callable, Sequence

from dmiddleware.errors import RouterError, TransportError
from dmiddleware.router.transport.callbacks import no_connection
from dmiddleware.router.transport.connection import PlainSocket, Wire
from dmiddleware.router.transport.interface import ListenLimits, RequestHandler
from dmiddleware.router.transport.io_loop import IoLoop
from dmiddleware.router.transport.socket_addresses import (
    TCP,
    TLS,
    ListeningSocket,
    connected_socket,
)
from dmiddleware.router.transport.socket_channel import SocketChannel
from dmiddleware.router.transport.socket_listener import SocketListener
from dmiddleware.router.transport.tls import TlsFiles, TlsSocket

__all__ = ["SocketTransport"]


class SocketTransport:
    """Unix-domain sockets for ``ipc`` addresses, TCP sockets for ``tcp`` and ``tls+tcp``.

    All its sockets share a few threads.

    Args:
        tls: certificates for ``tls+tcp`` addresses; None: such addresses are refused.

    Raises:
        TransportError: if the system is not Linux.
    """

    def __init__(self, *, tls: TlsFiles | None = None) -> None:
        if not hasattr(select, "epoll"):
            raise TransportError(
                "plain sockets need Linux; use NngTransport, or --mq-type nng with ditask"
            )
        self._tls = tls
        self._lock = threading.Lock()
        self._loop: IoLoop | None = None

    def listen(
        self,
        address: str,
        serve: RequestHandler,
        *,
        on_disconnect: Callable[[int], None],
        limits: ListenLimits,
    ) -> SocketListener:
        """Listen on an address; see :class:`~dmiddleware.router.transport.interface.Transport`."""
        tls = self._tls_for(address)
        secure = None if tls is None else TlsSocket.accepting(tls)
        listener = SocketListener(
            ListeningSocket(address),
            serve,
            on_disconnect=on_disconnect,
            limits=limits,
            secure=secure,
        )
        try:
            self._run(listener.start, f"listen on {address}")
        except BaseException:
            listener.close()
            raise
        return listener

    def dial(
        self,
        address: str,
        *,
        connect_timeout_s: float,
        reply_timeout_s: float,
        max_frame_bytes: int,
    ) -> SocketChannel:
        """Connect to an address; see :class:`~dmiddleware.router.transport.interface.Transport`."""
        tls = self._tls_for(address)
        deadline = time.monotonic() + connect_timeout_s
        connected = connected_socket(address, timeout_s=connect_timeout_s)
        try:
            wire: Wire = (
                PlainSocket(connected)
                if tls is None
                else TlsSocket.dialed(
                    connected, tls, address, timeout_s=deadline - time.monotonic()
                )
            )
            channel = SocketChannel(
                address, wire, reply_timeout_s=reply_timeout_s, max_frame_bytes=max_frame_bytes
            )
            self._run(channel.start, f"dial {address}")
        except RouterError:
            connected.close()
            raise
        except OSError as error:
            connected.close()
            raise no_connection(address, connect_timeout_s, error) from error
        except BaseException:
            connected.close()
            raise
        return channel

    def covers_body(self, address: str) -> bool:
        """Return whether frames need a MAC over all their bytes: on plain tcp only."""
        return address.startswith(TCP)

    def stage_arrays(self, arrays: Sequence[memoryview]) -> None:
        """Return None: arrays cannot be staged."""

    def _run(self, start: Callable[[IoLoop], bool], doing: str) -> None:
        """Start something on the loop; if that has just stopped, on a new one."""
        try:
            with self._lock:
                if self._loop is None or not start(self._loop):
                    self._loop = IoLoop()
                    start(self._loop)
        except (OSError, RuntimeError) as error:
            # The system allows no more threads or descriptors.
            raise TransportError(f"could not {doing}: {error}") from error

    def _tls_for(self, address: str) -> TlsFiles | None:
        if not address.startswith(TLS):
            return None
        if self._tls is None:
            raise TransportError(
                f"{address} needs certificates; pass tls=TlsFiles(…) to the transport"
            )
        return self._tls
