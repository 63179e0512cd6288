"""The transport within one process: no socket, and a network that can be harmed on purpose."""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable, Sequence

from dmiddleware.errors import TransportError
from dmiddleware.pipeline import Clock, SystemClock
from dmiddleware.router.transport.base import Serve
from dmiddleware.router.transport.memory_ends import MemoryChannel, MemoryListener, Message
from dmiddleware.router.wire.byte_pieces import Raw

__all__ = ["MemoryNetwork", "MemoryTransport"]

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
        clock: times the delays and deadlines, and starts the threads.
        delay_s: how long a message takes; called for each one. None: no time.
        observe: told of each message that arrives. None: no one is.

    Example:
        >>> network = MemoryNetwork()
        >>> here, there = network.transport("here"), network.transport("there")
        >>> listener = here.listen(
        ...     "memory://here",
        ...     lambda raw, connection, reply: reply(bytes(raw).upper()),
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
            now = self.clock.now()
            for message in self._between(one, other):
                # It is there, also if it is looked at later.
                message.has_arrived = self.arrival(message) <= now
            self._cut.add(frozenset((one, other)))

    def heal(self, one: str, other: str) -> None:
        """Let messages through again, those included that have waited."""
        with self.lock:
            if not self.is_cut(one, other):
                return
            now = self.clock.now()
            for message in self._between(one, other):
                if not message.has_arrived and max(message.arrives, message.deadline) <= now:
                    message.arrives = math.inf
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

    def send_off(self, source: str, target: str, raw: Raw, deadline: float) -> Message:
        """Return a message that leaves now; called with the network's lock held."""
        arrives = self.clock.now() + self._delay_s(source, target)
        return Message(source, target, bytearray(bytes(raw)), arrives, deadline)

    def arrival(self, message: Message) -> float:
        """Return when a message arrives, as things stand: never, behind a link that is cut."""
        is_held_up = self.is_cut(message.source, message.target) and not message.has_arrived
        return math.inf if is_held_up else message.arrives

    def arrived(self, message: Message) -> None:
        """Tell the observer of a message."""
        if self._observe is not None:
            self._observe(message.source, message.target, memoryview(message.content))

    def _channels_of(self, place: str) -> list[MemoryChannel]:
        return [
            channel
            for channel in list(self.channels.values())
            if place in (channel.source, channel.target)
        ]

    def _between(self, one: str, other: str) -> list[Message]:
        """Return the messages between two places that nobody has taken yet."""
        requests = [
            request.message for listener in self.listeners.values() for request in listener.coming
        ]
        answers = [
            request.answer
            for channel in self.channels.values()
            for request in channel.under_way
            if request.answer is not None
        ]
        return [
            message
            for message in requests + answers
            if {message.source, message.target} == {one, other}
        ]

    def _wake(self) -> None:
        self.listening.notify_all()
        for listener in self.listeners.values():
            listener.news.notify_all()
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
        listener.start()
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
