"""Listening: replies to the dialers' requests, and notices when their connections break."""

from __future__ import annotations

import logging
import math
from collections import deque
from functools import partial
from typing import Final

from dmiddleware.errors import RouterError
from dmiddleware.router.protocol.handshake import MAX_HANDSHAKE_BYTES
from dmiddleware.router.protocol.session import ParkedPoll
from dmiddleware.router.runtime.engine import Engine
from dmiddleware.router.transport import Listener, ListenLimits, Reply
from dmiddleware.router.wire.frame import (
    HEADER_SIZE,
    MAX_FRAME_BYTES,
    OutgoingFrame,
    digest_if_large,
)

__all__ = ["NodeListener"]

_logger = logging.getLogger(__name__)

_N_REMEMBERED: Final = 256
"""How many lost connections are remembered, for requests that are still being served."""

WARN_EVERY_S: Final = 1.0
"""Seconds between two warnings about rejected frames."""


class NodeListener:
    """An address that the router listens on.

    Args:
        engine: drives the node that replies.
        address: the address.

    Attributes:
        address: where others can dial; port 0 is replaced by the real one.

    Raises:
        TransportError: if the transport cannot listen on the address.
    """

    def __init__(self, engine: Engine, address: str) -> None:
        self._engine = engine
        self._cover_body = engine.transport.covers_body(address)
        self._disconnected: deque[int] = deque()
        self._sessions: dict[int, int] = {}
        self._lost: deque[int] = deque(maxlen=_N_REMEMBERED)
        # How many bytes had moved over the connections of silent peers.
        self._n_bytes: dict[int, int] = {}
        self._n_unreported = 0
        self._next_warning = -math.inf
        # Peers may connect before listen() returns, and be known to be peers by then.
        self._listener: Listener | None = None
        self._early: list[int] = []
        listener = engine.transport.listen(
            address,
            self._serve,
            on_disconnect=self._disconnected.append,
            limits=ListenLimits(
                max_frame_bytes=MAX_FRAME_BYTES,
                max_untrusted_frame_bytes=MAX_HANDSHAKE_BYTES + HEADER_SIZE,
            ),
        )
        self.address = listener.address
        with engine.lock:
            self._listener = listener
            for connection in self._early:
                listener.trust(connection)

    def close(self) -> None:
        """Stop listening."""
        if self._listener is not None:
            self._listener.close()

    def process_disconnects(self, now: float) -> None:
        """Find peers whose last connection broke; called with the lock held."""
        lost = set()
        while self._disconnected:
            connection = self._disconnected.popleft()
            self._lost.append(connection)
            lost.add(self._sessions.pop(connection, 0))
        if not lost:
            return
        node = self._engine.node
        for number in lost:
            node_id = node.node_of(number)
            if node_id is not None and number not in self._sessions.values():
                node.on_connection_lost(node_id, "the connection broke", now)

    def note_progress(self, now: float) -> None:
        """Keep silent peers connected whose connections carry bytes; called with the lock held."""
        node = self._engine.node
        quiet = set(node.quiet_peers(now))
        if not quiet or self._listener is None:
            self._n_bytes.clear()
            return
        before, self._n_bytes = self._n_bytes, {}
        for connection, session in self._sessions.items():
            node_id = node.node_of(session)
            if node_id in quiet:
                n_bytes = self._n_bytes[connection] = self._listener.n_bytes(connection)
                if node_id is not None and before.get(connection, n_bytes) != n_bytes:
                    node.on_progress(node_id, now)

    def _serve(self, raw: memoryview, connection: int, reply: Reply) -> None:
        engine = self._engine
        digest = digest_if_large(raw)
        with engine.lock:
            if engine.closing:
                reply(None)
                return
            now = engine.clock.now()
            # First, because a restarted node may dial as soon as the connection of its old process
            # breaks.
            self.process_disconnects(now)
            try:
                response = engine.node.on_request(
                    raw, now, cover_body=self._cover_body, body_digest=digest
                )
            except Exception as error:  # noqa: BLE001 (logged)
                # Whatever a peer sends, the other peers are served.
                engine.node.n_refused += 1
                self._warn(error, now)
                reply(None)
                return
            content, session = response
            # The last request of a connection may be served after the connection is known as lost.
            if session and (connection in self._sessions or connection not in self._lost):
                self._sessions[connection] = session
            if session and self._listener is None:
                self._early.append(connection)
            elif session and self._listener is not None:
                self._listener.trust(connection)
            if isinstance(content, ParkedPoll):
                engine.sender.park(content, reply)
            sends = engine.update()
        if not isinstance(content, ParkedPoll):
            # The reply to a poll carries events.
            sends.insert(0, partial(reply, content, urgent=not isinstance(content, OutgoingFrame)))
        engine.deliver_and_send(sends)

    def _warn(self, error: Exception, now: float) -> None:
        # An attacker may send thousands of bad frames a second, which must not fill the disk.
        if now < self._next_warning:
            self._n_unreported += 1
            return
        more = f" (and {self._n_unreported} more since)" if self._n_unreported else ""
        _logger.warning(
            "closed a connection because of a rejected frame: %s%s",
            error,
            more,
            exc_info=None if isinstance(error, RouterError) else error,
        )
        self._n_unreported, self._next_warning = 0, now + WARN_EVERY_S
