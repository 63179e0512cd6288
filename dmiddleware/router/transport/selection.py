"""Which transport carries the events of a process."""

from __future__ import annotations

from typing import Literal, TypeAlias

from dmiddleware.router.transport.socket_stream import SocketTransport
from dmiddleware.router.transport.stream import Transport
from dmiddleware.router.transport.tls import TlsFiles

__all__ = ["MqType", "make_transport"]

MqType: TypeAlias = Literal["socket", "nng"]
"""What carries ``ipc`` and ``tcp``."""


def make_transport(*, tls: TlsFiles | None = None, mq_type: MqType = "socket") -> Transport:
    """Return a transport.

    Args:
        tls: certificates for ``tls+tcp``, which nng carries with everything else; None: there are
            no such addresses.
        mq_type: what carries the others.
    """
    if tls is None and mq_type == "socket":
        return SocketTransport()
    # nng starts a dozen threads when it is loaded.
    from dmiddleware.router.transport.nng_stream import NngStreamTransport

    return NngStreamTransport(tls=tls)
