"""Dialing: connects to a peer, performs the handshake, sends heartbeats, and reconnects."""

from __future__ import annotations

import contextlib
import logging
import threading
import zlib
from functools import partial
from typing import Final

from dmiddleware.errors import (
    AuthError,
    FrameError,
    HandshakeRefused,
    RouterError,
    TransportError,
)
from dmiddleware.pipeline import Running
from dmiddleware.router.protocol.session import PeerSession, Request
from dmiddleware.router.runtime.engine import Engine
from dmiddleware.router.runtime.sender import SendAction
from dmiddleware.router.transport import Channel
from dmiddleware.router.wire.frame import MAX_FRAME_BYTES, FrameType, digest_if_large

__all__ = ["Dialer", "REPLY_TIMEOUT_S"]

_logger = logging.getLogger(__name__)

_MAX_PENDING: Final = 3
"""How many frames with events may be sent before the first reply."""

_N_POLLS: Final = 2
_N_MOMENTS: Final = 8
"""At how many moments between two heartbeats the nodes of a host send theirs. Those that arrive
together cost a peer much less than those that each wake it."""

_CONNECT_TIMEOUT_S: Final = 1.0
REPLY_TIMEOUT_S: Final = 3.0
"""How long a request may take before its connection counts as broken."""

_FIRST_PAUSE_S: Final = 0.05
_LONGEST_PAUSE_S: Final = 1.0
_FINAL: Final = frozenset({"run", "node_id_taken", "replaced"})
"""Signed refusals with these codes end this node at once."""

_TEMPORARY: Final = frozenset({"closing", "dialed", "stale"})
"""Signed refusals with these codes never end it."""


class Dialer:
    """Keeps a connection to one peer open, on a separate thread.

    Args:
        engine: drives this node.
        address: the peer's address; the peer may start late, stop, and come back.
        start_timeout_s: how long the peer may refuse this node before the node fails.
    """

    def __init__(self, engine: Engine, address: str, *, start_timeout_s: float) -> None:
        self._engine = engine
        self._address = address
        self._start_timeout_s = start_timeout_s
        self._was_connected = False
        self._refused_since: float | None = None
        self._changed = threading.Condition(engine.lock)
        self._closing = False
        self._goodbye = True
        self._thread: Running | None = None

    @property
    def engine(self) -> Engine:
        """The engine of this node."""
        return self._engine

    @property
    def address(self) -> str:
        """The peer's address."""
        return self._address

    @property
    def changed(self) -> threading.Condition:
        """Notified when the dialer closes or its connection breaks; uses the router's lock."""
        return self._changed

    @property
    def closing(self) -> bool:
        """Whether the dialer has been stopped."""
        return self._closing

    def start(self) -> None:
        """Start dialing."""
        self._thread = self._engine.clock.spawn(self._run, name=f"router-dial-{self._address}")

    @property
    def goodbye(self) -> bool:
        """Whether to say goodbye at the end."""
        return self._goodbye

    def stop(self, *, goodbye: bool) -> None:
        """End, after saying goodbye or not, without waiting for it."""
        with self._changed:
            self._closing, self._goodbye = True, goodbye
            self._changed.notify_all()

    def join(self) -> None:
        """Wait for the end, unless called from the dialer's own thread."""
        if self._thread is not None and not self._thread.is_current():
            self._thread.join(2 * REPLY_TIMEOUT_S)

    def forget_refusals(self) -> None:
        """Forget earlier refusals, because the peer has accepted this node or is gone."""
        self._refused_since = None
        with self._engine.lock:
            self._engine.refusals.pop(self._address, None)

    def _run(self) -> None:
        clock = self._engine.clock
        pause_s = _FIRST_PAUSE_S
        while not self._closing:
            connection = _Connection(self)
            started_at = clock.now()
            try:
                connection.run()
            except RouterError as error:
                _logger.debug("%s: %s", self._address, error)
                if not connection.authenticated and self._is_final(error):
                    self._engine.fail(error)
                    return
            except Exception as error:
                # Nothing else would dial this peer again.
                self._engine.fail(_internal_error(f"dialing {self._address}", error))
                raise
            if connection.authenticated:
                self._was_connected = True
                if clock.now() - started_at >= _LONGEST_PAUSE_S:
                    pause_s = _FIRST_PAUSE_S
            with self._changed:
                clock.wait_for(self._changed, lambda: self._closing, pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _is_final(self, error: RouterError) -> bool:
        """Return whether a failed handshake ends this node, rather than one attempt.

        Anyone on the way can forge an unsigned refusal or a damaged reply. These count only until
        the first session, where they usually mean that one side has a wrong key or version.
        """
        verified = isinstance(error, HandshakeRefused) and error.verified
        code = error.code if isinstance(error, HandshakeRefused) else ""
        if verified and code in _FINAL:
            return True
        counts = code not in _TEMPORARY if verified else not self._was_connected
        if isinstance(error, TransportError) or not counts:
            self.forget_refusals()
            return False
        with self._engine.lock:
            self._engine.refusals[self._address] = error
        now = self._engine.clock.now()
        if self._refused_since is None:
            self._refused_since = now
            _logger.warning("%s refused this node, retrying: %s", self._address, error)
        return now - self._refused_since >= self._start_timeout_s


class _Connection:
    """One connection, from the handshake until it breaks or the dialer closes.

    Attributes:
        authenticated: whether the handshake has succeeded.
    """

    def __init__(self, dialer: Dialer) -> None:
        self._dialer = dialer
        self._engine = dialer.engine
        self._address = dialer.address
        self._broken = False
        self._reason = "the connection broke"
        self.authenticated = False

    def run(self) -> None:
        with contextlib.ExitStack() as stack:
            channel = self._connect(stack)
            peer = self._handshake(channel)
            self.authenticated = True
            self._dialer.forget_refusals()
            try:
                events = _EventExchange(self, peer, channel)
                events.start()
                self._send_heartbeats(channel, peer, events)
            except AuthError as error:
                # The peer has proved that it has the key, so this frame was damaged on the way.
                self.mark_broken(str(error))
            finally:
                self._end(stack, peer)

    @property
    def engine(self) -> Engine:
        """The engine of this node."""
        return self._engine

    @property
    def broken(self) -> bool:
        """Whether the connection is over."""
        return self._broken

    def mark_broken(self, reason: str) -> None:
        """End the connection; only the first reason counts."""
        with self._dialer.changed:
            if not self._broken:
                self._reason = reason
                self._broken = True
                self._dialer.changed.notify_all()

    def fail(self, error: Exception) -> None:
        """Stop this node because of a defect, since nothing would be sent any more."""
        self._engine.fail(_internal_error(f"the connection to {self._address}", error))

    def _connect(self, stack: contextlib.ExitStack) -> Channel:
        channel = self._engine.transport.dial(
            self._address,
            connect_timeout_s=_CONNECT_TIMEOUT_S,
            reply_timeout_s=REPLY_TIMEOUT_S,
            max_frame_bytes=MAX_FRAME_BYTES,
        )
        stack.callback(channel.close)
        return channel

    def _handshake(self, channel: Channel) -> PeerSession:
        engine, node = self._engine, self._engine.node
        with engine.lock:
            handshake, hello = node.hello()
        challenge = channel.request(hello)
        with engine.lock:
            auth = node.on_challenge(handshake, challenge)
        welcome = channel.request(auth)
        with engine.lock:
            peer = node.on_welcome(
                handshake,
                welcome,
                engine.clock.now(),
                cover_body=engine.transport.covers_body(self._address),
            )
            sends = engine.update(peer.node_id)
        engine.deliver_and_send(sends)
        return peer

    def _send_heartbeats(self, channel: Channel, peer: PeerSession, events: _EventExchange) -> None:
        engine, node = self._engine, self._engine.node
        n_bytes = channel.n_bytes
        while not self._broken:
            # Not after the reply to the last one, which may have to wait for a large frame.
            events.send_heartbeat()
            if self._dialer.closing:
                if self._dialer.goodbye:
                    self._say_goodbye(channel, peer)
                return
            with self._dialer.changed:
                engine.clock.wait_for(
                    self._dialer.changed,
                    lambda: self._broken or self._dialer.closing,
                    self._until_next_heartbeat(),
                )
                now, before, n_bytes = engine.clock.now(), n_bytes, channel.n_bytes
                if n_bytes != before and peer.node_id in node.quiet_peers(now):
                    node.on_progress(peer.node_id, now)
                if not node.is_connected(peer.node_id):
                    self.mark_broken("the peer sends no replies")

    def _until_next_heartbeat(self) -> float:
        """Return the seconds to the next moment at which nodes of this host send a heartbeat."""
        node = self._engine.node
        heartbeat_s = node.options.heartbeat_s
        moment = zlib.crc32(node.identity.node_id.encode()) % _N_MOMENTS / _N_MOMENTS
        left_s = heartbeat_s - (self._engine.clock.now() - moment * heartbeat_s) % heartbeat_s
        # Not twice at the same moment, for example because of rounding.
        return left_s if left_s > heartbeat_s / 100 else left_s + heartbeat_s

    def _say_goodbye(self, channel: Channel, peer: PeerSession) -> None:
        engine, node = self._engine, self._engine.node
        with engine.lock:
            request = node.request(peer, FrameType.BYE)
        reply = channel.request(request.raw)
        with engine.lock:
            node.on_reply(peer, request, reply, engine.clock.now())

    def _end(self, stack: contextlib.ExitStack, peer: PeerSession) -> None:
        engine = self._engine
        with engine.lock:
            self._broken = True
            engine.sender.disconnect(peer.node_id)
        stack.close()
        with engine.lock:
            if engine.node.peers.get(peer.node_id) is peer and peer.dialed:
                engine.node.on_connection_lost(peer.node_id, self._reason, engine.clock.now())
            sends = engine.update(peer.node_id)
        engine.deliver_and_send(sends)


class _EventExchange:
    """The events of a connection: frames to the peer, and polls for frames from it.

    Its requests have no deadlines: the heartbeats notice a dead connection.

    It runs on the threads of emitters and of the channel, and has none of its own.
    """

    def __init__(self, connection: _Connection, peer: PeerSession, channel: Channel) -> None:
        self._connection = connection
        self._engine = connection.engine
        self._peer = peer
        self._channel = channel
        self._n_pending = 0

    def start(self) -> None:
        """Start sending and polling."""
        engine = self._engine
        with engine.lock:
            engine.sender.connect(self)
            sends = engine.update(self._peer.node_id)
            polls = [self._poll() for _ in range(_N_POLLS)]
        engine.deliver_and_send([*polls, *sends])

    @property
    def peer(self) -> PeerSession:
        """The listener."""
        return self._peer

    @property
    def has_room(self) -> bool:
        """Whether one more frame may be sent now."""
        return self._n_pending < _MAX_PENDING

    def reserve(self) -> None:
        """Count a frame that is about to be sent; called with the router's lock held."""
        self._n_pending += 1

    def send(self, request: Request) -> None:
        """Send a frame with events, without blocking."""
        on_reply = partial(self._on_reply, request, n_reserved=1)
        self._channel.send(request.raw, on_reply, timeout_s=None)

    def send_heartbeat(self) -> None:
        """Send a heartbeat, without waiting for the reply."""
        with self._engine.lock:
            request = self._engine.node.request(self._peer, FrameType.HEARTBEAT)
        on_reply = partial(self._on_reply, request, n_reserved=0)
        self._channel.send(request.raw, on_reply, timeout_s=None, urgent=True)

    def _poll(self) -> SendAction:
        """Make a poll; called with the router's lock held."""
        request = self._engine.node.request(self._peer, FrameType.POLL)
        on_reply = partial(self._on_reply, request, n_reserved=0)
        return partial(self._channel.send, request.raw, on_reply, timeout_s=None, urgent=True)

    def _on_reply(
        self, request: Request, reply: memoryview | TransportError, *, n_reserved: int
    ) -> None:
        """Process the outcome of a request, for which ``n_reserved`` frames were reserved."""
        try:
            self._process(request, reply, n_reserved)
        except (TransportError, HandshakeRefused, AuthError, FrameError) as error:
            self._connection.mark_broken(str(error))
        except Exception as error:
            self._connection.fail(error)
            raise

    def _process(
        self, request: Request, reply: memoryview | TransportError, n_reserved: int
    ) -> None:
        engine, node, peer = self._engine, self._engine.node, self._peer
        digest = None if isinstance(reply, TransportError) else digest_if_large(reply)
        with engine.lock:
            now = engine.clock.now()
            self._n_pending -= n_reserved
            if isinstance(reply, TransportError):
                if request.batch is not None:
                    peer.outgoing.on_failed(request.batch, now)
                raise reply
            if self._connection.broken:
                return
            kind = node.on_reply(peer, request, reply, now, body_digest=digest)
            sends = engine.update(peer.node_id)
            if kind is FrameType.BYE:
                self._connection.mark_broken("said goodbye")
            elif request.kind is FrameType.POLL:
                sends.insert(0, self._poll())
        engine.deliver_and_send(sends)


def _internal_error(where: str, error: Exception) -> RouterError:
    return RouterError(
        f"{where} failed with an internal error: {error!r}; the log has its traceback, please "
        "report it"
    )
