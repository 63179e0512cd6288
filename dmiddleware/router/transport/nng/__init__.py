"""Requests and replies over nng: Req0 and Rep0 with contexts, on ipc, tcp and tls+tcp."""

from dmiddleware.router.transport.nng.channel import NngChannel
from dmiddleware.router.transport.nng.listener import NngListener
from dmiddleware.router.transport.nng.transport import NngTransport
from dmiddleware.router.transport.tls import TlsFiles

__all__ = ["NngChannel", "NngListener", "NngTransport", "TlsFiles"]
