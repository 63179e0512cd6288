"""The two ends of a connection within one process: what lies there, and who waits for it."""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from dmiddleware.errors import TransportError
from dmiddleware.pipeline import Running
from dmiddleware.router.transport.base import OnAnswer, Serve
from dmiddleware.router.wire.byte_pieces import Raw

if TYPE_CHECKING:
    from dmiddleware.router.transport.memory import MemoryNetwork

__all__ = ["MemoryChannel", "MemoryListener", "Message"]

_WORKERS: Final = 4
_JOIN_S: Final = 5.0


@dataclass(eq=False, slots=True)
class Message:
    """Bytes on their way from one place to another.

    Attributes:
        source: where it comes from.
        target: where it goes.
        content: the bytes.
        arrives: when it arrives, if its link is not cut then.
        deadline: when it is lost, if its link is cut until then.
        has_arrived: whether it was there before its link was cut.
    """

    source: str
    target: str
    content: bytearray
    arrives: float
    deadline: float
    has_arrived: bool = False


@dataclass(eq=False, slots=True)
class Request:
    """A request, and its answer once there is one.

    Attributes:
        channel: what it was made on.
        message: the request itself.
        is_answered: whether the listener has answered it.
        answer: on its way back.
    """

    channel: MemoryChannel
    message: Message
    is_answered: bool = False
    answer: Message | None = None


class MemoryListener:
    """An address, and the threads that take what comes to it."""

    def __init__(
        self,
        network: MemoryNetwork,
        place: str,
        address: str,
        serve: Serve,
        on_gone: Callable[[int], None],
        max_frame_bytes: int,
    ) -> None:
        self.place = place
        self.news = threading.Condition(network.lock)
        self.coming: list[Request] = []
        self._network = network
        self._address = address
        self._serve = serve
        self._on_gone = on_gone
        self._max_frame_bytes = max_frame_bytes
        self._watch_ends = threading.Condition(network.lock)
        self._is_watched = False
        self._threads: list[Running] = []
        self._closed = False

    @property
    def address(self) -> str:
        """Where others can dial."""
        return self._address

    def start(self) -> None:
        """Start the threads."""
        for _ in range(_WORKERS):
            self._start_one()

    def send(self, request: Request) -> None:
        """Let a request come; called with the network's lock held."""
        self.coming.append(request)
        self.news.notify_all()

    def shut(self) -> None:
        """Take no more requests, and break all connections; called with the network's lock held."""
        self._closed = True
        self.news.notify_all()
        self._watch_ends.notify_all()
        for channel in list(self._network.channels.values()):
            if channel.listener is self:
                channel.break_off()

    def lose(self, channel: MemoryChannel) -> None:
        """Lose a connection, and what has not arrived over it; called as :meth:`shut` is.

        Who listens is told, unless the link is cut: then it finds out by itself.
        """
        now = self._network.clock.now()
        self.coming = [
            request
            for request in self.coming
            if request.channel is not channel or self._network.arrival(request.message) <= now
        ]
        if not self._network.is_cut(channel.source, channel.target):
            self._on_gone(channel.number)

    def close(self) -> None:
        """Stop listening and end the threads."""
        with self._network.lock:
            if self._network.listeners.get(self._address) is self:
                del self._network.listeners[self._address]
            if not self._closed:
                self.shut()
        for thread in self._threads:
            if not thread.is_current():
                thread.join(_JOIN_S)

    def _start_one(self) -> None:
        name = f"router-serve-{len(self._threads)}"
        self._threads.append(self._network.clock.spawn(self._work, name=name))

    def _work(self) -> None:
        while (request := self._next()) is not None:
            channel = request.channel
            try:
                self._serve(
                    memoryview(request.message.content),
                    channel.number,
                    functools.partial(channel.reply, request),
                )
            except Exception:
                # A defect is to be seen, and to harm this connection alone.
                with self._network.lock:
                    channel.break_off()
                self._start_one()
                raise

    def _next(self) -> Request | None:
        """Wait for the next request that arrives; None when the listener is closed."""
        network = self._network
        with network.lock:
            # One thread waits for what comes next, the others for its place.
            network.clock.wait_for(
                self._watch_ends, lambda: self._closed or not self._is_watched, None
            )
            self._is_watched = True
            try:
                while not self._closed:
                    request = self._await_arrival()
                    if request is not None:
                        return request
                return None
            finally:
                self._is_watched = False
                self._watch_ends.notify()

    def _await_arrival(self) -> Request | None:
        """Wait until something arrives or may do so earlier, and return it if it is accepted."""
        network = self._network
        arrives = self._next_arrival()
        if (left_s := arrives - network.clock.now()) > 0:
            network.clock.wait_for(
                self.news,
                lambda: self._closed or self._next_arrival() < arrives,
                None if left_s == math.inf else left_s,
            )
            return None
        request = min(self.coming, key=self._arrival)
        self.coming.remove(request)
        if len(request.message.content) > self._max_frame_bytes:
            request.channel.break_off()
            return None
        network.arrived(request.message)
        return request

    def _arrival(self, request: Request) -> float:
        return self._network.arrival(request.message)

    def _next_arrival(self) -> float:
        return min(map(self._arrival, self.coming), default=math.inf)


class MemoryChannel:
    """A connection to a listener."""

    def __init__(
        self,
        network: MemoryNetwork,
        source: str,
        listener: MemoryListener,
        answer_s: float,
        max_frame_bytes: int,
    ) -> None:
        self.number = next(network.numbers)
        self.source = source
        self.target = listener.place
        self.listener = listener
        self.news = threading.Condition(network.lock)
        self.under_way: dict[Request, OnAnswer | None] = {}
        self._network = network
        self._answer_s = answer_s
        self._max_frame_bytes = max_frame_bytes
        self._thread: Running | None = None
        self._closed = False

    def request(self, raw: Raw) -> memoryview:
        """Make a request and wait for its answer.

        Raises:
            TransportError: if there was no answer by the channel's deadline, or the connection
                broke.
        """
        with self._network.lock:
            if self._closed:
                raise self._closed_error()
            request = self._send_off(raw, None)
            try:
                while (outcome := self._outcome(request)) is None:
                    self._await_news(lambda: [request])
            finally:
                del self.under_way[request]
        if isinstance(outcome, TransportError):
            raise outcome
        return outcome

    def send(self, raw: Raw, on_answer: OnAnswer) -> None:
        """Make a request without waiting."""
        clock = self._network.clock
        with self._network.lock:
            if self._closed:
                error = self._closed_error()
                clock.spawn(lambda: on_answer(error), name="router-answers")
                return
            if self._thread is None:
                self._thread = clock.spawn(self._tell, name="router-answers")
            self._send_off(raw, on_answer)
            self.news.notify_all()

    def reply(self, request: Request, answer: Raw | None) -> None:
        """Answer a request, on the listener's side; only the first answer counts."""
        network = self._network
        with network.lock:
            if request.is_answered:
                return
            request.is_answered = True
            if answer is None:
                self.break_off()
            elif request in self.under_way:
                request.answer = network.send_off(
                    self.target, self.source, answer, request.message.deadline
                )
                self.news.notify_all()

    def close(self) -> None:
        """Close the connection; requests under way fail at once."""
        with self._network.lock:
            self.break_off()
        if self._thread is not None and not self._thread.is_current():
            self._thread.join(_JOIN_S)

    def break_off(self) -> None:
        """Break the connection; called with the network's lock held."""
        if self._closed:
            return
        self._closed = True
        del self._network.channels[self.number]
        self.news.notify_all()
        self.listener.lose(self)

    def _send_off(self, raw: Raw, on_answer: OnAnswer | None) -> Request:
        deadline = self._network.clock.now() + self._answer_s
        message = self._network.send_off(self.source, self.target, raw, deadline)
        request = Request(self, message)
        self.under_way[request] = on_answer
        self.listener.send(request)
        return request

    def _tell(self) -> None:
        while (told := self._next_told()) is not None:
            on_answer, outcome = told
            on_answer(outcome)

    def _next_told(self) -> tuple[OnAnswer, memoryview | TransportError] | None:
        """Wait for the next answer to what was sent; None when all are told and this is closed."""
        with self._network.lock:
            while True:
                for request, on_answer in self.under_way.items():
                    if on_answer is not None and (outcome := self._outcome(request)) is not None:
                        del self.under_way[request]
                        return on_answer, outcome
                if self._closed:
                    return None
                self._await_news(self._sent)

    def _sent(self) -> list[Request]:
        return [request for request, told in self.under_way.items() if told is not None]

    def _outcome(self, request: Request) -> memoryview | TransportError | None:
        """Return what has become of a request; None if it is under way."""
        now = self._network.clock.now()
        answer = request.answer
        if answer is not None and not self._closed and self._network.arrival(answer) <= now:
            if len(answer.content) > self._max_frame_bytes:
                self.break_off()
            else:
                self._network.arrived(answer)
                return memoryview(answer.content)
        if self._closed:
            return self._closed_error()
        if request.message.deadline <= now:
            return TransportError(
                f"{self.listener.address} gave no answer within {self._answer_s:g} s"
            )
        return None

    def _await_news(self, requests: Callable[[], list[Request]]) -> None:
        """Wait until something has become of one of the requests, or may do so earlier."""
        clock, until = self._network.clock, self._decided_at(requests())
        clock.wait_for(
            self.news,
            lambda: self._closed or self._decided_at(requests()) < until,
            None if until == math.inf else until - clock.now(),
        )

    def _decided_at(self, requests: list[Request]) -> float:
        """Return when the first of the requests is answered or too late, as things stand."""
        times = [request.message.deadline for request in requests]
        times += [
            self._network.arrival(request.answer)
            for request in requests
            if request.answer is not None
        ]
        return min(times, default=math.inf)

    def _closed_error(self) -> TransportError:
        return TransportError(f"the connection to {self.listener.address} is closed or broke")
