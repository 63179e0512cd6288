"""The listening side of a router: it answers requests, and notices whose connection is gone."""

from __future__ import annotations

import logging
import math
from collections import deque
from functools import partial
from typing import Final

from dmiddleware.errors import AuthError, FrameError, RouterError
from dmiddleware.router.core import Core
from dmiddleware.router.protocol.session import Parked
from dmiddleware.router.transport import Listener, Reply
from dmiddleware.router.wire.frame import session_of

__all__ = ["Listening"]

_logger = logging.getLogger(__name__)

_REMEMBERED: Final = 256
"""How many of the connections that are gone are known as such: they are news for a moment."""

WARN_EVERY_S: Final = 1.0
"""Connections closed for what came over them are told of so often at most."""


class Listening:
    """An address that the router listens on.

    Args:
        core: whose node answers.
        address: where.

    Raises:
        TransportError: if the address cannot be listened on.
    """

    def __init__(self, core: Core, address: str) -> None:
        self._core = core
        self._cover_body = core.transport.covers_body(address)
        self._gone: deque[int] = deque()
        self._sessions: dict[int, int] = {}
        self._lost: deque[int] = deque(maxlen=_REMEMBERED)
        self._unsaid = 0
        self._next_warning = -math.inf
        self._listener: Listener = core.transport.listen(
            address,
            self._serve,
            on_gone=self._gone.append,
            max_frame_bytes=core.node.options.max_frame_bytes,
        )

    @property
    def address(self) -> str:
        """Where peers can dial; port 0 has become a real one."""
        return self._listener.address

    def close(self) -> None:
        """Stop listening."""
        self._listener.close()

    def lose_connections(self, now: float) -> None:
        """Find peers whose last connection is gone; called with the lock held."""
        lost = set()
        while self._gone:
            connection = self._gone.popleft()
            self._lost.append(connection)
            lost.add(self._sessions.pop(connection, 0))
        if not lost:
            return
        alive = set(self._sessions.values())
        node = self._core.node
        for link in list(node.links.values()):
            number = link.session.number
            if not link.dialed and number in lost and number not in alive:
                node.on_lost(link.node_id, "its connection broke", now)

    def _serve(self, raw: memoryview, connection: int, reply: Reply) -> None:
        core = self._core
        with core.lock:
            if core.closing:
                reply(None)
                return
            now = core.clock.now()
            try:
                answer = core.node.on_request(raw, now, cover_body=self._cover_body)
            except (FrameError, AuthError) as error:
                core.node.refused += 1
                self._warn_of_stranger(error, now)
                reply(None)
                return
            session = session_of(raw)
            # What came last over a connection may be served when it is known to be gone.
            if connection in self._sessions or connection not in self._lost:
                self._sessions[connection] = session
            if isinstance(answer, Parked):
                core.pump.park(answer, reply, now)
            moves = core.after_input(core.node.node_of(session))
        if not isinstance(answer, Parked):
            moves.insert(0, partial(reply, answer))
        core.pass_on(moves)

    def _warn_of_stranger(self, error: RouterError, now: float) -> None:
        # One may come a thousand times a second, and must not fill the disk with it.
        if now < self._next_warning:
            self._unsaid += 1
            return
        unsaid = f" (and {self._unsaid} before it)" if self._unsaid else ""
        _logger.warning("a connection was closed: %s%s", error, unsaid)
        self._unsaid, self._next_warning = 0, now + WARN_EVERY_S
