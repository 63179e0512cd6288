"""The connections of a node, which it accepts, or dials and keeps up.

One thread of the router ticks: it dials, and closes what is late. The transport's thread processes
what arrives. Neither waits for a peer, so there is no thread for each of them.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from dataclasses import dataclass
from functools import partial
from typing import Final

from dmiddleware.errors import (
    AuthError,
    FrameError,
    HandshakeRefused,
    RouterError,
    TransportError,
)
from dmiddleware.router.protocol.greetings import MAX_STRANGER_BYTES
from dmiddleware.router.protocol.handshake import DialerHandshake
from dmiddleware.router.protocol.peer import PeerConnection
from dmiddleware.router.runtime.engine import TICK_S, Engine
from dmiddleware.router.transport.framed_connection import Callbacks, FramedConnection
from dmiddleware.router.transport.framed_listener import FramedListener
from dmiddleware.router.transport.shared_memory import SharedMemory
from dmiddleware.router.transport.stream import Transport, exposes_bytes
from dmiddleware.router.wire.frame import MAX_FRAME_BYTES, FrameType, digest_if_large

__all__ = ["Connections"]

_logger = logging.getLogger(__name__)

CONNECT_S: Final = 1.0
"""How long a connection may take."""

HANDSHAKE_S: Final = 3.0
"""How long a dialed peer may take to authenticate."""

GOODBYE_S: Final = 2.0
"""How long a connection stays after the peer has said goodbye, unless the peer closes it."""

SWEEP_S: Final = 1.0
"""When the files of a peer are removed after a connection with it has ended, if it is dead."""

CLOSE_S: Final = 5.0
"""How long closing waits until the transport has closed all connections."""

FIRST_PAUSE_S: Final = 0.05
LONGEST_PAUSE_S: Final = 1.0
WARN_EVERY_S: Final = 1.0
"""Seconds between two warnings about rejected frames."""

_BROKE: Final = "the connection broke"

_FINAL: Final = frozenset({"run", "node_id_taken", "replaced"})
"""Signed refusals with these codes end this node at once."""

_TEMPORARY: Final = frozenset({"closing", "connected", "stale"})
"""Refusals with these codes never end it."""


@dataclass(eq=False, slots=True)
class _Target:
    """An address that is dialed again whenever there is no connection.

    Attributes:
        address: the address.
        next_at: when to dial, or when to close the connection unless there is a session; infinity:
            neither is due.
        pause_s: how long to wait after the next failure.
        connection: the current connection; None: there is none.
        started_at: when it was dialed.
        was_connected: whether there has been a session.
        refused_since: since when the peer has refused this node.
    """

    address: str
    next_at: float
    pause_s: float = FIRST_PAUSE_S
    connection: PeerConnection | None = None
    started_at: float = 0.0
    was_connected: bool = False
    refused_since: float | None = None


class Connections:
    """Accepts connections, dials others, and passes their frames to the node.

    Args:
        engine: drives the node.
        transport: moves the bytes.
        memory: shared with peers of the same host; None: none is.
        start_timeout_s: how long a peer may refuse this node before the node fails.
    """

    def __init__(
        self,
        engine: Engine,
        transport: Transport,
        *,
        memory: SharedMemory | None = None,
        start_timeout_s: float,
    ) -> None:
        self._engine = engine
        self._transport = transport
        self._memory = memory
        self._sweep_at = math.inf
        self._start_timeout_s = start_timeout_s
        self._listener: FramedListener | None = None
        self._targets: dict[str, _Target] = {}
        # The connections whose peers have said goodbye, and when they are closed.
        self._left: deque[tuple[float, PeerConnection]] = deque()
        # How many bytes had moved over the connections of silent peers.
        self._moved: dict[PeerConnection, int] = {}
        self._n_unreported = 0
        self._next_warning = -math.inf

    @property
    def address(self) -> str:
        """Where peers can dial; empty if this node does not listen."""
        return "" if self._listener is None else self._listener.address

    def listen(self, address: str) -> None:
        """Listen on an address.

        Raises:
            TransportError: if the transport cannot listen there.
        """
        engine = self._engine
        covers_body = exposes_bytes(address)

        def on_connection(framed: FramedConnection) -> Callbacks:
            connection = self._new_connection(framed, dialed=False, covers_body=covers_body)
            return Callbacks(
                partial(self._on_frame, connection, accepted=framed),
                partial(self._on_end, connection),
                partial(engine.on_room, connection),
            )

        # Peers may connect before the listener is returned, and wait for the lock.
        with engine.lock:
            self._listener = FramedListener(
                self._transport,
                address,
                on_connection=on_connection,
                now=engine.clock.now,
                max_stranger_bytes=MAX_STRANGER_BYTES,
                max_frame_bytes=MAX_FRAME_BYTES,
            )

    def dial(self, address: str) -> None:
        """Keep a connection to an address; the peer may start late, stop, and come back."""
        with self._engine.lock:
            now = self._engine.clock.now()
            if address not in self._targets:
                self._targets[address] = _Target(address, now)
                self._engine.tick_by(now)

    def stop_dialing(self, address: str) -> None:
        """Close the connection to an address, and dial it no more."""
        with self._engine.lock:
            target = self._targets.pop(address, None)
            if target is not None and target.connection is not None:
                target.connection.route.close()

    def tick(self) -> float:
        """Dial and close what is due; return when to call this again."""
        engine = self._engine
        if self._listener is not None:
            self._listener.close_late()
        self._sweep()
        with engine.lock:
            now = engine.clock.now()
            self._note_progress(now)
            while self._left and self._left[0][0] <= now:
                self._left.popleft()[1].route.close()
            for target in list(self._targets.values()):
                if target.next_at > now:
                    continue
                if target.connection is None:
                    self._dial(target, now)
                else:
                    target.next_at = math.inf
                    target.connection.route.close(
                        TransportError(f"{target.address} did not answer within {HANDSHAKE_S:g} s")
                    )
            due = [target.next_at for target in self._targets.values()]
            due.append(self._sweep_at)
            if self._moved:
                # Twice before a silent peer counts as lost, to see whether bytes move.
                due.append(now + min(TICK_S, engine.node.options.heartbeat_s / 4))
            elif self._listener is not None or self._left:
                due.append(now + TICK_S)
            return min(due, default=math.inf)

    @property
    def is_settled(self) -> bool:
        """Whether no peer may count this node as connected that does not do so itself."""
        return not any(
            connection is not None
            and connection.session is None
            and isinstance(connection.handshake, DialerHandshake)
            and connection.handshake.awaits_welcome
            for connection in (target.connection for target in self._targets.values())
        )

    def close(self) -> None:
        """Stop listening and dialing, and close all connections; wait until they are gone."""
        with self._engine.lock:
            connections = [target.connection for target in self._targets.values()]
            self._targets.clear()
        for connection in connections:
            if connection is not None:
                connection.route.close()
        if self._listener is not None:
            self._listener.close()
        if not self._transport.close(timeout_s=CLOSE_S):
            _logger.debug("connections are still open")

    def _sweep(self) -> None:
        """Remove the files of peers that have died a moment ago."""
        with self._engine.lock:
            is_due = self._engine.clock.now() >= self._sweep_at
            if is_due:
                self._sweep_at = math.inf
        if is_due and self._memory is not None:
            self._memory.sweep()

    def _note_progress(self, now: float) -> None:
        """Keep silent peers connected whose connections move bytes."""
        before, self._moved = self._moved, {}
        for node_id in self._engine.node.quiet_peers(now):
            connection = self._engine.node.peers[node_id].connection
            if connection is None:
                continue
            n_moved = self._moved[connection] = connection.route.n_moved
            if before.get(connection, n_moved) != n_moved:
                self._engine.node.on_progress(node_id, now)

    def _dial(self, target: _Target, now: float) -> None:
        """Dial an address; called with the lock held."""
        try:
            stream = self._transport.dial(target.address, timeout_s=CONNECT_S)
        except RouterError as error:
            self._schedule(target, None, error, now)
            return

        framed = FramedConnection(stream, max_frame_bytes=MAX_STRANGER_BYTES)
        connection = self._new_connection(
            framed, dialed=True, covers_body=exposes_bytes(target.address)
        )
        target.connection, target.started_at, target.next_at = connection, now, now + HANDSHAKE_S
        self._engine.node.dial(connection)
        framed.start(
            Callbacks(
                partial(self._on_frame, connection, target=target),
                partial(self._on_end, connection, target=target),
                partial(self._engine.on_room, connection),
            )
        )
        framed.flush()

    def _new_connection(
        self, framed: FramedConnection, *, dialed: bool, covers_body: bool
    ) -> PeerConnection:
        if self._memory is None:
            return PeerConnection(framed, dialed=dialed, covers_body=covers_body)
        sharing = self._memory.sharing()
        framed.replace(sharing.put)
        return PeerConnection(framed, dialed=dialed, covers_body=covers_body, sharing=sharing)

    def _on_frame(
        self,
        connection: PeerConnection,
        raw: memoryview,
        *,
        target: _Target | None = None,
        accepted: FramedConnection | None = None,
    ) -> None:
        """Pass a frame to the node, and do what it asks for."""
        engine = self._engine
        if connection.sharing is not None:
            try:
                raw = connection.sharing.take(raw)
            except RouterError as error:
                self._on_unreadable(connection, error)
                return
        digest = digest_if_large(raw)
        with engine.lock:
            if engine.closing:
                return
            was_stranger, now = connection.session is None, engine.clock.now()
            try:
                kind = engine.node.on_frame(connection, raw, now, body_digest=digest)
            except (FrameError, AuthError, HandshakeRefused) as error:
                connection.route.close(error)
                return
            if was_stranger and connection.session is not None:
                self._on_session(connection, target, accepted)
            elif kind is FrameType.HELLO and accepted is not None and self._listener is not None:
                self._listener.note_hello(accepted)
            elif kind is FrameType.BYE:
                self._left.append((now + GOODBYE_S, connection))
                engine.tick_by(now + GOODBYE_S)
            if kind is FrameType.HEARTBEAT and not engine.node.unsent:
                return
            connections = engine.update()
        engine.deliver_and_send(connections)

    def _on_unreadable(self, connection: PeerConnection, error: RouterError) -> None:
        """End a connection because of a ticket whose frame cannot be read."""
        with self._engine.lock:
            is_valid = not isinstance(error, FrameError)
            if is_valid and connection.peer is not None and connection.sharing is not None:
                # A frame may also be gone because the peer has closed the connection.
                connection.peer.avoids_sharing = not connection.sharing.has_worked
        connection.route.close(error)

    def _on_session(
        self, connection: PeerConnection, target: _Target | None, accepted: FramedConnection | None
    ) -> None:
        if accepted is not None and self._listener is not None:
            self._listener.trust(accepted)
        if target is not None:
            target.was_connected, target.next_at = True, math.inf
            self._forget_refusals(target)
            connection.route.allow(MAX_FRAME_BYTES)

    def _on_end(
        self, connection: PeerConnection, error: RouterError, *, target: _Target | None = None
    ) -> None:
        engine = self._engine
        was_sharing = connection.sharing is not None and connection.sharing.is_agreed
        if connection.sharing is not None:
            connection.sharing.close()
        with engine.lock:
            if engine.closing:
                return
            now = engine.clock.now()
            if was_sharing:
                self._sweep_at = now + SWEEP_S
                engine.tick_by(self._sweep_at)
            was_rejected = isinstance(error, FrameError | AuthError)
            engine.node.n_refused += was_rejected or isinstance(error, HandshakeRefused)
            if was_rejected and (target is None or connection.session is not None):
                self._warn(error, now)
            engine.node.on_end(connection, str(error) if was_rejected else _BROKE, now)
            self._moved.pop(connection, None)
            if target is not None and target.connection is connection:
                target.connection = None
                self._schedule(target, connection, error, now)
            connections = engine.update()
        engine.deliver_and_send(connections)

    def _schedule(
        self, target: _Target, connection: PeerConnection | None, error: RouterError, now: float
    ) -> None:
        """Dial again after a while, unless the error ends this node."""
        _logger.debug("%s: %s", target.address, error)
        if self._targets.get(target.address) is not target:
            return
        if connection is not None and connection.session is not None:
            if now - target.started_at >= LONGEST_PAUSE_S:
                target.pause_s = FIRST_PAUSE_S
        elif self._is_final(target, error, now):
            target.next_at = math.inf
            self._engine.fail(error)
            return
        target.next_at = now + target.pause_s
        target.pause_s = min(2 * target.pause_s, LONGEST_PAUSE_S)
        self._engine.tick_by(target.next_at)

    def _is_final(self, target: _Target, error: RouterError, now: float) -> bool:
        """Return whether a failed handshake ends this node, rather than one attempt.

        Anyone on the way can forge an unsigned refusal or a damaged answer. These count only until
        the first session, where they usually mean that one side has a wrong key or version.
        """
        verified = isinstance(error, HandshakeRefused) and error.verified
        code = error.code if isinstance(error, HandshakeRefused) else ""
        if verified and code in _FINAL:
            return True
        counts = code not in _TEMPORARY and (verified or not target.was_connected)
        if isinstance(error, TransportError) or not counts:
            self._forget_refusals(target)
            return False
        self._engine.refusals[target.address] = error
        if target.refused_since is None:
            target.refused_since = now
            _logger.warning("%s refused this node, retrying: %s", target.address, error)
        return now - target.refused_since >= self._start_timeout_s

    def _forget_refusals(self, target: _Target) -> None:
        """Forget earlier refusals, because the peer has accepted this node or is gone."""
        target.refused_since = None
        self._engine.refusals.pop(target.address, None)

    def _warn(self, error: Exception, now: float) -> None:
        # An attacker may send thousands of bad frames a second, which must not fill the disk.
        if now < self._next_warning:
            self._n_unreported += 1
            return
        more = f" (and {self._n_unreported} more since)" if self._n_unreported else ""
        _logger.warning("closed a connection because of a rejected frame: %s%s", error, more)
        self._n_unreported, self._next_warning = 0, now + WARN_EVERY_S
