"""The transport within one process: no sockets, and a network that tests can disturb on purpose.

It runs a whole cluster in one test process, also under a simulated clock.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from dmiddleware.errors import TransportError
from dmiddleware.pipeline import Clock, Running, SystemClock
from dmiddleware.router.transport.callbacks import no_connection
from dmiddleware.router.transport.interface import (
    Channel,
    Listener,
    ListenLimits,
    OnReply,
    RequestHandler,
)
from dmiddleware.router.wire.byte_pieces import WireBytes

__all__ = ["MemoryNetwork", "MemoryTransport"]

Delay = Callable[[str, str], float]
"""Returns how many seconds a packet takes from one host to another."""

Observer = Callable[[str, str, memoryview], None]
"""Called with the source, the target and the content of each packet that arrives."""


def _at_once(source: str, target: str) -> float:
    return 0.0


class MemoryNetwork:
    """Connects the memory transports of one process, and can cut the links between them.

    Addresses have the form ``memory://name``. Packets between the same two hosts overtake each
    other if their delays differ, as on any network. A packet on a cut link waits until the link is
    healed, and is lost at its request's deadline.

    Args:
        clock: times the delays and deadlines, and starts the threads.
        delay_s: called for each packet; returns how long it takes. None: packets take no time.
        observe: called for each packet that arrives. None: packets are not observed.

    Example:
        >>> from dmiddleware.router.transport import ListenLimits
        >>> network = MemoryNetwork()
        >>> here, there = network.transport("here"), network.transport("there")
        >>> listener = here.listen(
        ...     "memory://here",
        ...     lambda raw, connection, reply: reply(bytes(raw).upper()),
        ...     on_disconnect=lambda connection: None,
        ...     limits=ListenLimits(max_frame_bytes=100, max_untrusted_frame_bytes=100),
        ... )
        >>> channel = there.dial(
        ...     "memory://here", connect_timeout_s=1, reply_timeout_s=1, max_frame_bytes=100
        ... )
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

    def transport(self, host: str) -> MemoryTransport:
        """Return the transport of one host."""
        return MemoryTransport(self, host)

    def cut(self, one: str, other: str) -> None:
        """Cut the link between two hosts; neither of them is notified."""
        with self.lock:
            now = self.clock.now()
            for packet in self._between(one, other):
                # It has arrived, even if it is looked at later.
                packet.has_arrived = self.arrival(packet) <= now
            self._cut.add(frozenset((one, other)))
            self._update_arrivals()

    def heal(self, one: str, other: str) -> None:
        """Heal the link between two hosts; waiting packets arrive."""
        with self.lock:
            if not self.is_cut(one, other):
                return
            now = self.clock.now()
            for packet in self._between(one, other):
                if not packet.has_arrived and max(packet.arrives, packet.deadline) <= now:
                    packet.arrives = math.inf
            self._cut.discard(frozenset((one, other)))
            self._update_arrivals()
            self._wake()

    def disconnect(self, one: str, other: str) -> None:
        """Break the connections between two hosts; both are notified and may reconnect."""
        with self.lock:
            for channel in self._channels_of(one):
                if other in (channel.source, channel.target):
                    channel.abort()

    def is_cut(self, one: str, other: str) -> bool:
        """Return whether the link between two hosts is cut."""
        return frozenset((one, other)) in self._cut

    def remove(self, host: str) -> None:
        """Remove a host as if its process were killed: its connections break."""
        with self.lock:
            for address, listener in list(self.listeners.items()):
                if listener.host == host:
                    listener.shut()
                    del self.listeners[address]
            for channel in self._channels_of(host):
                channel.abort()

    def transmit(self, source: str, target: str, raw: WireBytes, deadline: float) -> Packet:
        """Return a packet that is sent now; called with the network's lock held."""
        arrives = self.clock.now() + self._delay_s(source, target)
        return Packet(source, target, bytearray(bytes(raw)), arrives, deadline)

    def arrival(self, packet: Packet) -> float:
        """Return when a packet arrives as things are now; infinity on a cut link."""
        is_blocked = self.is_cut(packet.source, packet.target) and not packet.has_arrived
        return math.inf if is_blocked else packet.arrives

    def arrived(self, packet: Packet) -> None:
        """Show a packet to the observer."""
        if self._observe is not None:
            self._observe(packet.source, packet.target, memoryview(packet.content))

    def _channels_of(self, host: str) -> list[MemoryChannel]:
        return [
            channel
            for channel in list(self.channels.values())
            if host in (channel.source, channel.target)
        ]

    def _between(self, one: str, other: str) -> list[Packet]:
        """Return the packets between two hosts that have not been processed yet."""
        requests = [
            request.packet
            for listener in self.listeners.values()
            for _, _, request in listener.arriving
        ]
        responses = [
            request.response
            for channel in self.channels.values()
            for request in channel.pending
            if request.response is not None
        ]
        return [
            packet
            for packet in requests + responses
            if {packet.source, packet.target} == {one, other}
        ]

    def _update_arrivals(self) -> None:
        for listener in self.listeners.values():
            listener.update_arrivals()

    def _wake(self) -> None:
        self.listening.notify_all()
        for listener in self.listeners.values():
            listener.changed.notify_all()
        for channel in self.channels.values():
            channel.changed.notify_all()


class MemoryTransport:
    """The transport of one host of a :class:`MemoryNetwork`.

    Args:
        network: the network.
        host: the host's name.
    """

    def __init__(self, network: MemoryNetwork, host: str) -> None:
        self._network = network
        self._host = host

    def listen(
        self,
        address: str,
        serve: RequestHandler,
        *,
        on_disconnect: Callable[[int], None],
        limits: ListenLimits,
    ) -> MemoryListener:
        """Listen on an address.

        Raises:
            TransportError: if the address already has a listener.
        """
        network = self._network
        with network.lock:
            if address in network.listeners:
                raise TransportError(
                    f"could not listen on {address}: it already has a listener, close it first"
                )
            listener = MemoryListener(network, self._host, address, serve, on_disconnect, limits)
            network.listeners[address] = listener
            network.listening.notify_all()
        listener.start()
        return listener

    def dial(
        self,
        address: str,
        *,
        connect_timeout_s: float,
        reply_timeout_s: float,
        max_frame_bytes: int,
    ) -> MemoryChannel:
        """Connect to an address.

        Raises:
            TransportError: if the address has no listener within ``connect_timeout_s``.
        """
        network = self._network

        def is_reachable() -> bool:
            found = network.listeners.get(address)
            return found is not None and not network.is_cut(self._host, found.host)

        with network.lock:
            if not network.clock.wait_for(network.listening, is_reachable, connect_timeout_s):
                raise no_connection(address, connect_timeout_s)
            listener = network.listeners[address]
            channel = MemoryChannel(network, self._host, listener, reply_timeout_s, max_frame_bytes)
            network.channels[channel.number] = channel
            return channel

    def covers_body(self, address: str) -> bool:
        """Return False: frames never leave the process."""
        return False

    def stage_arrays(self, arrays: Sequence[memoryview]) -> None:
        """Return None: arrays cannot be staged."""


_WORKERS: Final = 4
_JOIN_S: Final = 5.0


@dataclass(eq=False, slots=True)
class Packet:
    """Bytes on the way from one host to another.

    Attributes:
        source: the sending host.
        target: the receiving host.
        content: the bytes.
        arrives: when it arrives, unless its link is cut then.
        deadline: when it is lost, if its link is still cut then.
        has_arrived: whether it arrived before its link was cut.
    """

    source: str
    target: str
    content: bytearray
    arrives: float
    deadline: float
    has_arrived: bool = False


@dataclass(eq=False, slots=True)
class Request:
    """A request, and its reply once there is one.

    Attributes:
        channel: the channel that it was made on.
        packet: the request itself.
        timeout_s: how long its reply is awaited.
        has_reply: whether the listener has replied.
        response: the packet with the reply.
    """

    channel: MemoryChannel
    packet: Packet
    timeout_s: float
    has_reply: bool = False
    response: Packet | None = None


class MemoryListener(Listener):
    """An address, and the threads that serve its requests."""

    def __init__(
        self,
        network: MemoryNetwork,
        host: str,
        address: str,
        serve: RequestHandler,
        on_disconnect: Callable[[int], None],
        limits: ListenLimits,
    ) -> None:
        self.host = host
        self.changed = threading.Condition(network.lock)
        # A heap: when a request arrives as things are now, a number, and the request.
        self.arriving: list[tuple[float, int, Request]] = []
        self._n_sent = itertools.count()
        self._network = network
        self._address = address
        self._serve = serve
        self._on_disconnect = on_disconnect
        self._limits = limits
        self._turn = threading.Condition(network.lock)
        self._has_watcher = False
        self._threads: list[Running] = []
        self._closed = False

    @property
    def address(self) -> str:
        """Where others can dial."""
        return self._address

    def trust(self, connection: int) -> None:
        """Lift the frame limit of a connection; the others do not apply in one process."""
        with self._network.lock:
            if (channel := self._network.channels.get(connection)) is not None:
                channel.trusted = True

    def start(self) -> None:
        """Start the threads."""
        for _ in range(_WORKERS):
            self._start_one()

    def send(self, request: Request) -> None:
        """Send a request to this listener; called with the network's lock held."""
        arrives = self._network.arrival(request.packet)
        heapq.heappush(self.arriving, (arrives, next(self._n_sent), request))
        self.changed.notify_all()

    def update_arrivals(self) -> None:
        """Note that a link was cut or healed; called with the network's lock held."""
        self.arriving = [
            (self._network.arrival(request.packet), number, request)
            for _, number, request in self.arriving
        ]
        heapq.heapify(self.arriving)

    def shut(self) -> None:
        """Accept no more requests, break all connections; called with the network's lock held."""
        self._closed = True
        self.changed.notify_all()
        self._turn.notify_all()
        for channel in list(self._network.channels.values()):
            if channel.listener is self:
                channel.abort()

    def drop_channel(self, channel: MemoryChannel) -> None:
        """Drop a connection and what has not arrived over it; called as :meth:`shut` is.

        The listener is notified unless the link is cut: then it has to find out by heartbeats.
        """
        now = self._network.clock.now()
        self.arriving = [
            arrival
            for arrival in self.arriving
            if arrival[2].channel is not channel or arrival[0] <= now
        ]
        heapq.heapify(self.arriving)
        if not self._network.is_cut(channel.source, channel.target):
            self._on_disconnect(channel.number)

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
                    memoryview(request.packet.content),
                    channel.number,
                    functools.partial(channel.reply, request),
                )
            except Exception:
                # A defect must be visible, and must break only this connection.
                with self._network.lock:
                    channel.abort()
                self._start_one()
                raise

    def _next(self) -> Request | None:
        """Wait for the next request that arrives; None when the listener is closed."""
        network = self._network
        with network.lock:
            # One thread watches for the next request, the others for their turn to watch.
            network.clock.wait_for(self._turn, lambda: self._closed or not self._has_watcher, None)
            self._has_watcher = True
            try:
                while not self._closed:
                    request = self._await_arrival()
                    if request is not None:
                        return request
                return None
            finally:
                self._has_watcher = False
                self._turn.notify()

    def _await_arrival(self) -> Request | None:
        """Wait until a request arrives and return it, or None if an earlier arrival is possible."""
        network = self._network
        arrives = self._next_arrival()
        if (left_s := arrives - network.clock.now()) > 0:
            network.clock.wait_for(
                self.changed,
                lambda: self._closed or self._next_arrival() < arrives,
                None if left_s == math.inf else left_s,
            )
            return None
        _, _, request = heapq.heappop(self.arriving)
        limits, channel = self._limits, request.channel
        allowed = limits.max_frame_bytes if channel.trusted else limits.max_untrusted_frame_bytes
        if len(request.packet.content) > allowed:
            channel.abort()
            return None
        network.arrived(request.packet)
        return request

    def _next_arrival(self) -> float:
        return self.arriving[0][0] if self.arriving else math.inf


class MemoryChannel(Channel):
    """A connection to a listener."""

    def __init__(
        self,
        network: MemoryNetwork,
        source: str,
        listener: MemoryListener,
        reply_timeout_s: float,
        max_frame_bytes: int,
    ) -> None:
        self.number = next(network.numbers)
        self.source = source
        self.target = listener.host
        self.listener = listener
        self.trusted = False
        self.changed = threading.Condition(network.lock)
        self.pending: dict[Request, OnReply | None] = {}
        self._network = network
        self._reply_timeout_s = reply_timeout_s
        self._max_frame_bytes = max_frame_bytes
        self._thread: Running | None = None
        self._closed = False

    def request(self, raw: WireBytes) -> memoryview:
        """Make a request and wait for its reply.

        Raises:
            TransportError: if no reply arrived by the channel's deadline, or the connection
                broke.
        """
        with self._network.lock:
            if self._closed:
                raise self._closed_error()
            request = self._transmit(raw, None, self._reply_timeout_s)
            try:
                while (outcome := self._outcome(request)) is None:
                    self._wait_for_change(lambda: [request])
            finally:
                del self.pending[request]
        if isinstance(outcome, TransportError):
            raise outcome
        return outcome

    def send(
        self,
        raw: WireBytes,
        on_reply: OnReply,
        *,
        timeout_s: float | None,
        urgent: bool = False,
    ) -> None:
        """Make a request without waiting; packets never wait for each other."""
        clock = self._network.clock
        with self._network.lock:
            if self._closed:
                error = self._closed_error()
                clock.spawn(lambda: on_reply(error), name="router-replies")
                return
            if self._thread is None:
                self._thread = clock.spawn(self._run_callbacks, name="router-replies")
            self._transmit(raw, on_reply, timeout_s)
            self.changed.notify_all()

    def reply(self, request: Request, response: WireBytes | None, *, urgent: bool = False) -> None:
        """Reply to a request, on the listener's side; only the first reply counts."""
        network = self._network
        with network.lock:
            if request.has_reply:
                return
            request.has_reply = True
            if response is None:
                self.abort()
            elif request in self.pending:
                request.response = network.transmit(
                    self.target, self.source, response, request.packet.deadline
                )
                self.changed.notify_all()

    def close(self) -> None:
        """Close the connection; pending requests fail at once."""
        with self._network.lock:
            self.abort()
        if self._thread is not None and not self._thread.is_current():
            self._thread.join(_JOIN_S)

    def abort(self) -> None:
        """Break the connection; called with the network's lock held."""
        if self._closed:
            return
        self._closed = True
        del self._network.channels[self.number]
        self.changed.notify_all()
        self.listener.drop_channel(self)

    def _transmit(
        self, raw: WireBytes, on_reply: OnReply | None, timeout_s: float | None
    ) -> Request:
        deadline = math.inf if timeout_s is None else self._network.clock.now() + timeout_s
        packet = self._network.transmit(self.source, self.target, raw, deadline)
        request = Request(self, packet, math.inf if timeout_s is None else timeout_s)
        self.pending[request] = on_reply
        self.listener.send(request)
        return request

    def _run_callbacks(self) -> None:
        while (finished := self._next_outcome()) is not None:
            on_reply, outcome = finished
            on_reply(outcome)

    def _next_outcome(self) -> tuple[OnReply, memoryview | TransportError] | None:
        """Wait for the next outcome of a sent request; None once closed and none is left."""
        with self._network.lock:
            while True:
                for request, on_reply in self.pending.items():
                    if on_reply is not None and (outcome := self._outcome(request)) is not None:
                        del self.pending[request]
                        return on_reply, outcome
                if self._closed:
                    return None
                self._wait_for_change(self._sent)

    def _sent(self) -> list[Request]:
        return [request for request, on_reply in self.pending.items() if on_reply is not None]

    def _outcome(self, request: Request) -> memoryview | TransportError | None:
        """Return the outcome of a request; None while it is pending."""
        now = self._network.clock.now()
        response = request.response
        if response is not None and not self._closed and self._network.arrival(response) <= now:
            if len(response.content) > self._max_frame_bytes:
                self.abort()
            else:
                self._network.arrived(response)
                return memoryview(response.content)
        if self._closed:
            return self._closed_error()
        if request.packet.deadline <= now:
            return TransportError(
                f"no reply from {self.listener.address} within {request.timeout_s:g} s"
            )
        return None

    def _wait_for_change(self, requests: Callable[[], list[Request]]) -> None:
        """Wait until one of the requests has an outcome, or may have one earlier."""
        clock, until = self._network.clock, self._next_change_at(requests())
        clock.wait_for(
            self.changed,
            lambda: self._closed or self._next_change_at(requests()) < until,
            None if until == math.inf else until - clock.now(),
        )

    def _next_change_at(self, requests: list[Request]) -> float:
        """Return when the first of the requests gets a reply or expires, as things are now."""
        times = [request.packet.deadline for request in requests]
        times += [
            self._network.arrival(request.response)
            for request in requests
            if request.response is not None
        ]
        return min(times, default=math.inf)

    def _closed_error(self) -> TransportError:
        return TransportError(f"the connection to {self.listener.address} is closed or broken")
