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
from dmiddleware.pipeline import Running
from dmiddleware.router.link import Link
from dmiddleware.router.outgoing import Sending
from dmiddleware.router.parts import Raw
from dmiddleware.router.transport import Channel
from dmiddleware.router.wire import FrameType

if TYPE_CHECKING:
    from dmiddleware.router.router import Router

__all__ = ["Dialer"]

_logger = logging.getLogger(__name__)

_SENDERS: Final = 3
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
        self._changed = threading.Condition(router.lock)
        self._closing = False
        self._thread: Running | None = None

    @property
    def router(self) -> Router:
        """Whose node talks."""
        return self._router

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
        self._thread = self._router.clock.spawn(self._run, name=f"router-dial-{self._address}")

    def close(self) -> None:
        """Say goodbye and end."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(2 * _ANSWER_S)

    def _run(self) -> None:
        pause_s = _FIRST_PAUSE_S
        while not self._closing:
            try:
                _Session(self).run()
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
            with self._changed:
                self._router.clock.wait_for(self._changed, lambda: self._closing, pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


class _Session:
    """One connection, from the handshake until it breaks or the dialer closes."""

    def __init__(self, dialer: Dialer) -> None:
        self._dialer = dialer
        self._router = dialer.router
        self._address = dialer.address
        self._broken = False
        self._reason = "the connection broke"

    def run(self) -> None:
        with contextlib.ExitStack() as stack:
            control = self._connect(stack)
            link = self._shake_hands(control)
            threads: list[Running] = []
            try:
                data = self._connect(stack)
                jobs = [self._send_forever] * _SENDERS + [self._poll_forever] * _POLLERS
                threads += [self._spawn(job, data, link) for job in jobs]
                self._keep_in_touch(control, link)
            except AuthError as error:
                # The peer has shown that it has the key: this frame was damaged on its way.
                self._break(link, str(error))
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

    def _spawn(self, job: Callable[[Channel, Link], None], channel: Channel, link: Link) -> Running:
        def work() -> None:
            try:
                job(channel, link)
            except (TransportError, HandshakeRefused, AuthError, FrameError) as error:
                self._break(link, str(error))
            except Exception as error:
                # A defect: without this thread nothing would go out, and no one would know why.
                self._router.fail(
                    RouterError(f"the connection to {self._address} failed within: {error!r}")
                )
                raise

        name = f"router-{job.__name__.strip('_').partition('_')[0]}-{self._address}"
        return self._router.clock.spawn(work, name=name)

    def _send_forever(self, channel: Channel, link: Link) -> None:
        router, node = self._router, self._router.node
        while True:
            made = self._next_data(link)
            if made is None:
                return
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

    def _next_data(self, link: Link) -> tuple[Sending, Raw] | None:
        """Wait until there is something to send; None when the connection broke."""
        router, node = self._router, self._router.node
        made: list[tuple[Sending, Raw]] = []
        looks_at = 0.0

        def is_due() -> bool:
            if self._broken:
                return True
            request = node.data_request(link, router.clock.now())
            if request is not None:
                made.append(request)
                return True
            # Something may be due before this wait ends; then it begins anew.
            due_at = link.outgoing.next_time()
            return due_at is not None and due_at < looks_at

        with router.lock:
            while not made and not self._broken:
                now, due_at = router.clock.now(), link.outgoing.next_time()
                pause_s = 1.0 if due_at is None else max(0.001, min(1.0, due_at - now))
                looks_at = now + pause_s
                router.clock.wait_for(router.outbound(link.node_id), is_due, pause_s)
        return None if self._broken else made[0]

    def _poll_forever(self, channel: Channel, link: Link) -> None:
        router, node = self._router, self._router.node
        while not self._broken:
            with router.lock:
                raw = node.request(link, FrameType.POLL)
            answer = channel.request(raw)
            with router.lock:
                kind = node.on_answer(link, answer, router.clock.now())
                router.after_input()
            if kind is FrameType.BYE:
                self._break(link, "said goodbye")

    def _keep_in_touch(self, channel: Channel, link: Link) -> None:
        router, node = self._router, self._router.node
        while not self._broken:
            with router.lock:
                raw = node.request(link, FrameType.HEARTBEAT)
            answer = channel.request(raw)
            with router.lock:
                node.on_answer(link, answer, router.clock.now())
            if self._dialer.closing:
                self._say_goodbye(channel, link)
                return
            with self._dialer.changed:
                router.clock.wait_for(
                    self._dialer.changed,
                    lambda: self._broken or self._dialer.closing,
                    router.options.heartbeat_s,
                )

    def _say_goodbye(self, channel: Channel, link: Link) -> None:
        router, node = self._router, self._router.node
        with router.lock:
            raw = node.request(link, FrameType.BYE)
        answer = channel.request(raw)
        with router.lock:
            node.on_answer(link, answer, router.clock.now())

    def _break(self, link: Link, reason: str) -> None:
        with self._dialer.changed:
            if not self._broken:
                self._reason = reason
                self._broken = True
                self._dialer.changed.notify_all()
                self._router.outbound(link.node_id).notify_all()

    def _end(self, stack: contextlib.ExitStack, link: Link, threads: list[Running]) -> None:
        router = self._router
        with router.lock:
            self._broken = True
        stack.close()
        with router.lock:
            router.outbound(link.node_id).notify_all()
        for thread in threads:
            thread.join(2 * _ANSWER_S)
        with router.lock:
            if router.node.links.get(link.node_id) is link and link.dialed:
                router.node.on_lost(link.node_id, self._reason, router.clock.now())
            router.after_input()
