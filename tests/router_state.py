"""What tests read and break inside a router; the only place that reaches into one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from dmiddleware.router import Router
from dmiddleware.router.protocol.node import NodeProtocol

__all__ = ["break_connection", "locked_node", "n_refused"]


@contextmanager
def locked_node(router: Router) -> Iterator[NodeProtocol]:
    """Give the protocol of a router, which does nothing meanwhile."""
    engine = router._engine
    with engine.lock:
        yield engine.node


def n_refused(router: Router) -> int:
    """Return how many handshakes and frames a router has refused."""
    with locked_node(router) as node:
        return node.n_refused


def break_connection(router: Router, peer: int) -> None:
    """Close a router's connection to a peer, if there is one, without a word."""
    with locked_node(router) as node:
        connection = node.peers[str(peer)].connection
    if connection is not None:
        connection.route.close()
