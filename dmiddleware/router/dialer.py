"""The dialing side of a router: it connects, shakes hands, keeps in touch, and begins again."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from dmiddleware.errors import (
    AuthError,
    FrameError,
    HandshakeRefused,
    RouterError,
    TransportError,
)
from dmiddleware.router.node import Link
from dmiddleware.router.transport import Channel
from dmiddleware.router.wire import FrameType

if TYPE_CHECKING:
    from dmiddleware.router.router import Router

__all__ = ["Dialer"]

_logger = logging.getLogger(__name__)

_SENDERS: Final = 2
_POLLERS: Final = 2
_CONNECT_S: Final = 1.0
_ANSWER_S: Final = 3.0
_FIRST_PAUSE_S: Final = 0.05
_LONGEST_PAUSE_S: Final = 1.0
_FATAL: Final = frozenset({"version", "run", "key", "node_id_taken"})


class Dialer:
    """Keeps one peer dialed, from a thread of its own.

    Args:
        router: whose node talks.
        address: of the peer, which may come late, go, and come back.
    """

    def __init__(self, router: Router, address: str) -> None:
        self._router = router
        self._address = address
        self._closing = threading.Event()
        self._session: _Session | None = None
        self._thread = threading.Thread(
            target=self._run, name=f"router-dial-{address}", daemon=True
        )

    def start(self) -> None:
        """Begin to dial."""
        self._thread.start()

    def close(self) -> None:
        """Say goodbye and end."""
        self._closing.set()
        session = self._session
        if session is not None:
            session.wake()
        self._thread.join(2 * _ANSWER_S)

    def _run(self) -> None:
        pause_s = _FIRST_PAUSE_S
        while not self._closing.is_set():
            try:
                self._session = _Session(self._router, self._address, self._closing)
                self._session.run()
                pause_s = _FIRST_PAUSE_S
            except HandshakeRefused as error:
                if error.code in _FATAL:
                    self._router.fail(error)
                    return
                _logger.info("%s: %s", self._address, error)
            except AuthError as error:
                self._router.fail(error)
                return
            except RouterError as error:
                _logger.debug("%s: %s", self._address, error)
            self._closing.wait(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


class _Session:
    """One connection, from the handshake until it breaks or the dialer closes."""

    def __init__(self, router: Router, address: str, closing: threading.Event) -> None:
        self._router = router
        self._address = address
        self._closing = closing
        self._broken = threading.Event()
        self._awake = threading.Event()
        self._reason = "the connection broke"

    def run(self) -> None:
        with contextlib.ExitStack() as stack:
            control = self._connect(stack)
            link = self._shake_hands(control)
            threads: list[threading.Thread] = []
            try:
                data = self._connect(stack)
                jobs = [self._send_forever] * _SENDERS + [self._poll_forever] * _POLLERS
                threads += [self._spawn(job, data, link) for job in jobs]
                self._keep_in_touch(control, link)
            finally:
                self._end(stack, link, threads)

    def _connect(self, stack: contextlib.ExitStack) -> Channel:
        channel = self._router.transport.dial(
            self._address,
            connect_s=_CONNECT_S,
            answer_s=_ANSWER_S,
            max_frame_bytes=self._router.options.max_frame_bytes,
        )
        stack.callback(channel.close)
        return channel

    def _shake_hands(self, channel: Channel) -> Link:
        router, node = self._router, self._router.node
        with router.lock:
            handshake, hello = node.hello()
        challenge = channel.request(hello)
        with router.lock:
            auth = node.on_challenge(handshake, challenge)
        welcome = channel.request(auth)
        with router.lock:
            link = node.on_welcome(
                handshake,
                welcome,
                router.clock.now(),
                cover_body=router.transport.covers_body(self._address),
            )
            router.after_input()
            return link

    def _spawn(
        self, job: Callable[[Channel, Link], None], channel: Channel, link: Link
    ) -> threading.Thread:
        def work() -> None:
            try:
                job(channel, link)
            except (TransportError, HandshakeRefused, AuthError, FrameError) as error:
                self._break(str(error))

        name = f"router-{job.__name__.strip('_').partition('_')[0]}-{self._address}"
        thread = threading.Thread(target=work, name=name, daemon=True)
        thread.start()
        return thread

    def _send_forever(self, channel: Channel, link: Link) -> None:
        router, node = self._router, self._router.node
        condition = router.outbound(link.node_id)
        while not self._broken.is_set():
            with router.lock:
                now = router.clock.now()
                made = node.data_request(link, now)
                if made is None:
                    next_time = link.outgoing.next_time()
                    pause_s = 1.0 if next_time is None else min(1.0, next_time - now)
                    condition.wait(max(0.001, pause_s))
                    continue
            sending, raw = made
            try:
                answer = channel.request(raw)
            except TransportError:
                with router.lock:
                    node.on_no_answer(link, sending, router.clock.now())
                raise
            with router.lock:
                node.on_answer(link, answer, router.clock.now(), sent=sending)
                router.after_input()

    def _poll_forever(self, channel: Channel, link: Link) -> None:
        router, node = self._router, self._router.node
        while not self._broken.is_set():
            with router.lock:
                raw = node.request(link, FrameType.POLL)
            answer = channel.request(raw)
            with router.lock:
                kind = node.on_answer(link, answer, router.clock.now())
                router.after_input()
            if kind is FrameType.BYE:
                self._break("said goodbye")

    def _keep_in_touch(self, channel: Channel, link: Link) -> None:
        router, node = self._router, self._router.node
        while not self._broken.is_set():
            with router.lock:
                raw = node.request(link, FrameType.HEARTBEAT)
            answer = channel.request(raw)
            with router.lock:
                node.on_answer(link, answer, router.clock.now())
            if self._closing.is_set():
                self._say_goodbye(channel, link)
                return
            self._awake.wait(router.options.heartbeat_s)

    def wake(self) -> None:
        """Look at once whether the dialer closes or the connection broke."""
        self._awake.set()

    def _say_goodbye(self, channel: Channel, link: Link) -> None:
        router, node = self._router, self._router.node
        with router.lock:
            raw = node.request(link, FrameType.BYE)
        answer = channel.request(raw)
        with router.lock:
            node.on_answer(link, answer, router.clock.now())

    def _break(self, reason: str) -> None:
        if not self._broken.is_set():
            self._reason = reason
            self._broken.set()
            self._awake.set()

    def _end(
        self, stack: contextlib.ExitStack, link: Link, threads: list[threading.Thread]
    ) -> None:
        router = self._router
        self._broken.set()
        stack.close()
        with router.lock:
            router.outbound(link.node_id).notify_all()
        for thread in threads:
            thread.join(2 * _ANSWER_S)
        with router.lock:
            if router.node.links.get(link.node_id) is link and link.dialed:
                router.node.on_lost(link.node_id, self._reason, router.clock.now())
            router.after_input()
