"""The transport within one process: no socket, and a network that can be harmed on purpose."""

from __future__ import annotations

import itertools
import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from dmiddleware.errors import TransportError
from dmiddleware.pipeline import Clock, Running, SystemClock
from dmiddleware.router.parts import Raw
from dmiddleware.router.transport.base import Serve

__all__ = ["MemoryNetwork", "MemoryTransport"]

_logger = logging.getLogger(__name__)

_BASE_WORKERS: Final = 4
_JOIN_S: Final = 5.0

Delay = Callable[[str, str], float]
"""Returns how many seconds a message takes from one place to another."""

Observer = Callable[[str, str, memoryview], None]
"""Told of each message that arrives: from where, to where, and what."""


def _at_once(source: str, target: str) -> float:
    return 0.0


class MemoryNetwork:
    """Connects the memory transports of one process, and can cut their links.

    Addresses are of the form ``memory://name``. Messages between the same two places overtake each
    other when their delays differ, as on any network; a message that meets a cut link waits until
    the link is healed, and is lost at its request's deadline.

    Args:
        clock: times the delays and deadlines, and starts the listeners' threads.
        delay_s: how long a message takes; called for each one. None: no time.
        observe: told of each message that arrives. None: no one is.

    Example:
        >>> network = MemoryNetwork()
        >>> here, there = network.transport("here"), network.transport("there")
        >>> listener = here.listen(
        ...     "memory://here",
        ...     lambda raw, connection: bytes(raw).upper(),
        ...     on_gone=lambda connection: None,
        ...     max_frame_bytes=100,
        ... )
        >>> channel = there.dial("memory://here", connect_s=1, answer_s=1, max_frame_bytes=100)
        >>> bytes(channel.request(b"hello"))
        b'HELLO'
        >>> channel.close(), listener.close()
        (None, None)
    """

    def __init__(
        self,
        *,
        clock: Clock | None = None,
        delay_s: Delay | None = None,
        observe: Observer | None = None,
    ) -> None:
        self.clock: Clock = clock if clock is not None else SystemClock()
        self.lock = threading.RLock()
        self.listening = threading.Condition(self.lock)
        self.listeners: dict[str, MemoryListener] = {}
        self.channels: dict[int, MemoryChannel] = {}
        self.numbers = itertools.count(1)
        self._delay_s = delay_s if delay_s is not None else _at_once
        self._observe = observe
        self._cut: set[frozenset[str]] = set()

    def transport(self, place: str) -> MemoryTransport:
        """Return the transport of one place, from which and to which links can be cut."""
        return MemoryTransport(self, place)

    def cut(self, one: str, other: str) -> None:
        """Let nothing through between two places; neither of them is told."""
        with self.lock:
            self._cut.add(frozenset((one, other)))

    def heal(self, one: str, other: str) -> None:
        """Let messages through again, those included that have waited."""
        with self.lock:
            self._cut.discard(frozenset((one, other)))
            self._wake()

    def disconnect(self, one: str, other: str) -> None:
        """Break the connections between two places; both are told, and may dial anew."""
        with self.lock:
            for channel in self._channels_of(one):
                if other in (channel.source, channel.target):
                    channel.break_off()

    def is_cut(self, one: str, other: str) -> bool:
        """Tell whether the link between two places is cut."""
        return frozenset((one, other)) in self._cut

    def remove(self, place: str) -> None:
        """Take a place away, as if its process were killed: its connections break."""
        with self.lock:
            for address, listener in list(self.listeners.items()):
                if listener.place == place:
                    listener.shut()
                    del self.listeners[address]
            for channel in self._channels_of(place):
                channel.break_off()

    def travel_time(self, source: str, target: str) -> float:
        """Return how long the next message between two places takes."""
        return self._delay_s(source, target)

    def arrived(self, source: str, target: str, raw: memoryview) -> None:
        """Tell the observer of a message."""
        if self._observe is not None:
            self._observe(source, target, raw)

    def _channels_of(self, place: str) -> list[MemoryChannel]:
        return [
            channel
            for channel in list(self.channels.values())
            if place in (channel.source, channel.target)
        ]

    def _wake(self) -> None:
        self.listening.notify_all()
        for channel in self.channels.values():
            channel.news.notify_all()


class MemoryTransport:
    """One place's access to a :class:`MemoryNetwork`.

    Args:
        network: what it connects to.
        place: its name there.
    """

    def __init__(self, network: MemoryNetwork, place: str) -> None:
        self._network = network
        self._place = place

    def listen(
        self, address: str, serve: Serve, *, on_gone: Callable[[int], None], max_frame_bytes: int
    ) -> MemoryListener:
        """Listen on an address.

        Raises:
            TransportError: if someone listens there already.
        """
        network = self._network
        with network.lock:
            if address in network.listeners:
                raise TransportError(f"could not listen on {address}: it is in use")
            listener = MemoryListener(
                network, self._place, address, serve, on_gone, max_frame_bytes
            )
            network.listeners[address] = listener
            network.listening.notify_all()
        listener.grow(_BASE_WORKERS)
        return listener

    def dial(
        self, address: str, *, connect_s: float, answer_s: float, max_frame_bytes: int
    ) -> MemoryChannel:
        """Connect to an address.

        Raises:
            TransportError: if nobody listens there within ``connect_s``.
        """
        network = self._network

        def is_reachable() -> bool:
            found = network.listeners.get(address)
            return found is not None and not network.is_cut(self._place, found.place)

        with network.lock:
            if not network.clock.wait_for(network.listening, is_reachable, connect_s):
                raise TransportError(
                    f"could not dial {address}: nobody answered within {connect_s:g} s"
                )
            listener = network.listeners[address]
            channel = MemoryChannel(network, self._place, listener, answer_s, max_frame_bytes)
            network.channels[channel.number] = channel
            return channel

    def covers_body(self, address: str) -> bool:
        """Tell that frames need not have all their bytes signed: they never leave the process."""
        return False

    def lay_down(self, arrays: Sequence[memoryview]) -> None:
        """Tell that arrays have no place of their own here."""


@dataclass(eq=False, slots=True)
class _Request:
    """A request, and its answer once there is one."""

    raw: bytearray
    channel: MemoryChannel
    answer: Raw | None = None


class MemoryListener:
    """An address, and the threads that answer what comes to it."""

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
        self.max_frame_bytes = max_frame_bytes
        self._network = network
        self._address = address
        self._serve = serve
        self._on_gone = on_gone
        self._arrived = threading.Condition(network.lock)
        self._requests: deque[_Request] = deque()
        self._threads: list[Running] = []
        self._closed = False

    @property
    def address(self) -> str:
        """Where others can dial."""
        return self._address

    def grow(self, workers: int) -> None:
        """Serve at least so many requests at a time."""
        while len(self._threads) < workers and not self._closed:
            name = f"router-serve-{len(self._threads)}"
            self._threads.append(self._network.clock.spawn(self._work, name=name))

    def take(self, request: _Request) -> None:
        """Take a request that has arrived; called with the network's lock held."""
        self._requests.append(request)
        self._arrived.notify()

    def shut(self) -> None:
        """Take no more requests, and break all connections; called with the network's lock held."""
        self._closed = True
        self._arrived.notify_all()
        for channel in list(self._network.channels.values()):
            if channel.listener is self:
                channel.break_off()

    def lose(self, connection: int) -> None:
        """Take note that a connection is gone."""
        self._on_gone(connection)

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

    def _work(self) -> None:
        while (request := self._next()) is not None:
            answer = self._serve(memoryview(request.raw), request.channel.number)
            with self._network.lock:
                if answer is None:
                    request.channel.break_off()
                else:
                    request.answer = answer
                    request.channel.news.notify_all()

    def _next(self) -> _Request | None:
        with self._network.lock:
            self._network.clock.wait_for(
                self._arrived, lambda: self._closed or bool(self._requests), None
            )
            return None if self._closed else self._requests.popleft()


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
        self._network = network
        self._answer_s = answer_s
        self._max_frame_bytes = max_frame_bytes
        self._closed = False

    def request(self, raw: Raw) -> memoryview:
        """Make a request and wait for its answer.

        Raises:
            TransportError: if there was no answer by the channel's deadline, or the connection
                broke.
        """
        deadline = self._network.clock.now() + self._answer_s
        request = _Request(bytearray(bytes(raw)), self)
        with self._network.lock:
            self._travel(self.source, self.target, deadline)
            if len(raw) > self.listener.max_frame_bytes:
                self.break_off()
            else:
                self._network.arrived(self.source, self.target, memoryview(request.raw))
                self.listener.take(request)
            self._wait(lambda: request.answer is not None, deadline)
            answer = bytearray(bytes(request.answer or b""))
            self._travel(self.target, self.source, deadline)
            if len(answer) > self._max_frame_bytes:
                self.break_off()
                self._refuse_closed()
            self._network.arrived(self.target, self.source, memoryview(answer))
            return memoryview(answer)

    def close(self) -> None:
        """Close the connection; requests under way fail at once."""
        with self._network.lock:
            self.break_off()

    def break_off(self) -> None:
        """Break the connection; called with the network's lock held.

        The listener is told, unless the link is cut: then it finds out by itself.
        """
        if self._closed:
            return
        self._closed = True
        del self._network.channels[self.number]
        self.news.notify_all()
        if not self._network.is_cut(self.source, self.target):
            self.listener.lose(self.number)

    def _travel(self, source: str, target: str, deadline: float) -> None:
        """Wait as long as a message takes, and until its link is not cut."""
        network = self._network
        self._refuse_closed()
        delay_s = network.travel_time(source, target)
        if delay_s > 0:
            network.clock.wait_for(self.news, lambda: self._closed, delay_s)
        self._wait(lambda: not network.is_cut(source, target), deadline)

    def _wait(self, predicate: Callable[[], bool], deadline: float) -> None:
        clock = self._network.clock
        left_s = max(0.0, deadline - clock.now())
        came = clock.wait_for(self.news, lambda: self._closed or predicate(), left_s)
        self._refuse_closed()
        if not came:
            raise TransportError(
                f"{self.listener.address} gave no answer within {self._answer_s:g} s"
            )

    def _refuse_closed(self) -> None:
        if self._closed:
            raise TransportError(f"the connection to {self.listener.address} is closed or broke")
