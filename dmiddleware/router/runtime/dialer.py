"""The dialing side of a router: it connects, shakes hands, keeps in touch, and begins again."""

from __future__ import annotations

import contextlib
import logging
import threading
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
from dmiddleware.router.core import Core
from dmiddleware.router.protocol.outgoing import Sending
from dmiddleware.router.protocol.session import Link
from dmiddleware.router.runtime.sender import Move
from dmiddleware.router.transport import Channel
from dmiddleware.router.wire.byte_pieces import Raw
from dmiddleware.router.wire.frame import FrameType

__all__ = ["Dialer"]

_logger = logging.getLogger(__name__)

_UNDER_WAY: Final = 3
"""So many frames with events are sent before the answer to the first of them."""

_POLLS: Final = 2
_CONNECT_S: Final = 1.0
_ANSWER_S: Final = 3.0
_FIRST_PAUSE_S: Final = 0.05
_LONGEST_PAUSE_S: Final = 1.0
_FATAL: Final = frozenset({"version", "run", "key", "node_id_taken", "replaced"})


class Dialer:
    """Keeps one peer dialed, from a thread of its own.

    Args:
        core: whose node talks.
        address: of the peer, which may come late, go, and come back.
    """

    def __init__(self, core: Core, address: str) -> None:
        self._core = core
        self._address = address
        self._changed = threading.Condition(core.lock)
        self._closing = False
        self._thread: Running | None = None

    @property
    def core(self) -> Core:
        """Whose node talks."""
        return self._core

    @property
    def address(self) -> str:
        """The peer's address."""
        return self._address

    @property
    def changed(self) -> threading.Condition:
        """Notified when the dialer closes or its connection breaks; of the router's lock."""
        return self._changed

    @property
    def closing(self) -> bool:
        """Whether the dialer was told to end."""
        return self._closing

    def start(self) -> None:
        """Begin to dial."""
        self._thread = self._core.clock.spawn(self._run, name=f"router-dial-{self._address}")

    def stop(self) -> None:
        """Begin to say goodbye and to end, without waiting for it."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()

    def close(self) -> None:
        """Say goodbye and end; on the dialer's own thread, without waiting for that."""
        self.stop()
        if self._thread is not None and not self._thread.is_current():
            self._thread.join(2 * _ANSWER_S)

    def _run(self) -> None:
        pause_s = _FIRST_PAUSE_S
        while not self._closing:
            try:
                _Session(self).run()
                pause_s = _FIRST_PAUSE_S
            except HandshakeRefused as error:
                if error.code in _FATAL:
                    self._core.fail(error)
                    return
                _logger.info("%s: %s", self._address, error)
            except AuthError as error:
                self._core.fail(error)
                return
            except RouterError as error:
                _logger.debug("%s: %s", self._address, error)
            except Exception as error:
                # Nobody else would dial this peer again.
                self._core.fail(RouterError(f"dialing {self._address} failed within: {error!r}"))
                raise
            with self._changed:
                self._core.clock.wait_for(self._changed, lambda: self._closing, pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


class _Session:
    """One connection, from the handshake until it breaks or the dialer closes.

    It has two channels, so that bulk does not hold up the heartbeats.
    """

    def __init__(self, dialer: Dialer) -> None:
        self._dialer = dialer
        self._core = dialer.core
        self._address = dialer.address
        self._broken = False
        self._reason = "the connection broke"

    def run(self) -> None:
        with contextlib.ExitStack() as stack:
            control = self._connect(stack)
            link = self._shake_hands(control)
            try:
                _Exchange(self, link, self._connect(stack)).start()
                self._keep_in_touch(control, link)
            except AuthError as error:
                # The peer has shown that it has the key: this frame was damaged on its way.
                self.break_off(str(error))
            finally:
                self._end(stack, link)

    @property
    def core(self) -> Core:
        """Whose node talks."""
        return self._core

    @property
    def broken(self) -> bool:
        """Whether it is over."""
        return self._broken

    def break_off(self, reason: str) -> None:
        """End it; only the first reason counts."""
        with self._dialer.changed:
            if not self._broken:
                self._reason = reason
                self._broken = True
                self._dialer.changed.notify_all()

    def fail(self, error: Exception) -> None:
        """Take note of a defect: without this connection nothing would go out."""
        self._core.fail(RouterError(f"the connection to {self._address} failed within: {error!r}"))

    def _connect(self, stack: contextlib.ExitStack) -> Channel:
        channel = self._core.transport.dial(
            self._address,
            connect_s=_CONNECT_S,
            answer_s=_ANSWER_S,
            max_frame_bytes=self._core.node.options.max_frame_bytes,
        )
        stack.callback(channel.close)
        return channel

    def _shake_hands(self, channel: Channel) -> Link:
        core, node = self._core, self._core.node
        with core.lock:
            handshake, hello = node.hello()
        challenge = channel.request(hello)
        with core.lock:
            auth = node.on_challenge(handshake, challenge)
        welcome = channel.request(auth)
        with core.lock:
            link = node.on_welcome(
                handshake,
                welcome,
                core.clock.now(),
                cover_body=core.transport.covers_body(self._address),
            )
            moves = core.after_input(link.node_id)
        core.pass_on(moves)
        return link

    def _keep_in_touch(self, channel: Channel, link: Link) -> None:
        core = self._core
        while not self._broken:
            self._ask(channel, link, FrameType.HEARTBEAT)
            if self._dialer.closing:
                self._ask(channel, link, FrameType.BYE)
                return
            with self._dialer.changed:
                core.clock.wait_for(
                    self._dialer.changed,
                    lambda: self._broken or self._dialer.closing,
                    core.node.options.heartbeat_s,
                )

    def _ask(self, channel: Channel, link: Link, kind: FrameType) -> None:
        core, node = self._core, self._core.node
        with core.lock:
            raw = node.request(link, kind)
        answer = channel.request(raw)
        with core.lock:
            node.on_answer(link, answer, core.clock.now())

    def _end(self, stack: contextlib.ExitStack, link: Link) -> None:
        core = self._core
        with core.lock:
            self._broken = True
            core.pump.disconnect(link.node_id)
        stack.close()
        with core.lock:
            if core.node.links.get(link.node_id) is link and link.dialed:
                core.node.on_lost(link.node_id, self._reason, core.clock.now())
            moves = core.after_input(link.node_id)
        core.pass_on(moves)


class _Exchange:
    """The events of a session: those to the peer, and polls for those from it.

    What it does, it does on the threads of emitters and of the channels; it has none of its own.
    """

    def __init__(self, session: _Session, link: Link, channel: Channel) -> None:
        self._session = session
        self._core = session.core
        self._link = link
        self._channel = channel
        self._under_way = 0

    def start(self) -> None:
        """Begin to send and to poll."""
        core = self._core
        with core.lock:
            core.pump.connect(self)
            moves = core.after_input(self._link.node_id)
            polls = [self._poll() for _ in range(_POLLS)]
        core.pass_on([*polls, *moves])

    @property
    def link(self) -> Link:
        """The peer."""
        return self._link

    @property
    def has_room(self) -> bool:
        """Whether one more frame may be under way."""
        return self._under_way < _UNDER_WAY

    def reserve(self) -> None:
        """Take note that a frame will be sent; called with the router's lock held."""
        self._under_way += 1

    def send(self, sending: Sending, raw: Raw) -> None:
        """Send a frame with events, without waiting."""
        self._channel.send(raw, partial(self._on_answer, sending))

    def _poll(self) -> Move:
        """Make a poll; called with the router's lock held."""
        raw = self._core.node.request(self._link, FrameType.POLL)
        return partial(self._channel.send, raw, partial(self._on_answer, None))

    def _on_answer(self, sending: Sending | None, answer: memoryview | TransportError) -> None:
        """Take what became of a frame with events, or of a poll."""
        try:
            self._take(sending, answer)
        except (TransportError, HandshakeRefused, AuthError, FrameError) as error:
            self._session.break_off(str(error))
        except Exception as error:
            self._session.fail(error)
            raise

    def _take(self, sending: Sending | None, answer: memoryview | TransportError) -> None:
        core, node, link = self._core, self._core.node, self._link
        with core.lock:
            now = core.clock.now()
            self._under_way -= sending is not None
            if isinstance(answer, TransportError):
                if sending is not None:
                    link.outgoing.on_failed(sending, now)
                raise answer
            if self._session.broken:
                return
            kind = node.on_answer(link, answer, now, sent=sending)
            moves = core.after_input(link.node_id)
            if kind is FrameType.BYE:
                self._session.break_off("said goodbye")
            elif sending is None:
                moves.insert(0, self._poll())
        core.pass_on(moves)
