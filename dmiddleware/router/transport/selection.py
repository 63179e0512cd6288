"""Which transport carries the events of a process."""

from __future__ import annotations

from typing import Literal

from dmiddleware.router.transport.socket_stream import SocketTransport
from dmiddleware.router.transport.stream import Transport
from dmiddleware.router.transport.tls import TlsFiles

__all__ = ["make_transport"]


def make_transport(
    *, tls: TlsFiles | None = None, mq_type: Literal["socket", "nng"] = "socket"
) -> Transport:
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
