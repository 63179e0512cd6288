"""A network within one process, which tests can disturb on purpose.

Its transports implement the seam of :mod:`dmiddleware.router.transport.stream`. With a
:class:`~dmiddleware.testing.Simulation` as its clock and a seeded source of delays, the same seed
gives the same run.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Final

from dmiddleware.errors import RouterError, RouterStateError, TransportError
from dmiddleware.pipeline import Clock, Running, SystemClock
from dmiddleware.router.transport.stream import OnBytes, OnConnection, OnSent, Piece
from dmiddleware.router.wire.stream_frames import FrameReader

__all__ = ["HostTransport", "MemoryListener", "MemoryStream", "StreamNetwork", "fill", "frames_in"]

_logger = logging.getLogger(__name__)

Call = Callable[[], None]

CAPACITY_BYTES: Final = 1 << 18
"""How many bytes one direction of a connection holds that the other side has not received."""


Delay = Callable[[str, str], float]
"""Returns how many seconds a packet takes from one host to another."""

Observe = Callable[["MemoryStream", bytes], None]
"""Takes the side of a connection at which bytes have arrived, and the bytes."""


def fill(targets: Iterable[memoryview], content: bytes | bytearray) -> int:
    """Copy bytes into the targets of a stream, as far as they reach; return how many."""
    n_bytes = 0
    for target in targets:
        part = content[n_bytes : n_bytes + len(target)]
        target[: len(part)] = part
        n_bytes += len(part)
    return n_bytes


def frames_in(content: bytes, reader: FrameReader) -> Iterator[memoryview]:
    """Yield the frames that are complete once a reader has received these bytes."""
    while content:
        n_bytes = fill(reader.targets, content)
        content = content[n_bytes:]
        yield from reader.add(n_bytes)


def _at_once(source: str, target: str) -> float:
    return 0.0


class StreamNetwork:
    """Connects hosts, and can cut the links between them.

    Addresses have the form ``memory://name``. Bytes on a cut link wait until the link is healed.
    The end of a connection waits too, so a host may hold connections that the other one has closed.
    Within a connection, nothing is lost and nothing overtakes.

    Args:
        clock: times the delays, and starts a thread for each host.
        delay_s: called with the two hosts for each packet; returns how long it takes. None: packets
            take no time.
        observe: called with all bytes that arrive; None: nothing is.

    Example:
        >>> network = StreamNetwork()
        >>> accepted = []
        >>> listener = network.transport("here").listen("memory://here", accepted.append)
        >>> stream = network.transport("there").dial("memory://here", timeout_s=1)
        >>> listener.close(), stream.close()
        (None, None)
    """

    def __init__(
        self,
        *,
        clock: Clock | None = None,
        delay_s: Delay | None = None,
        observe: Observe | None = None,
    ) -> None:
        self.clock: Clock = clock if clock is not None else SystemClock()
        self.lock = threading.RLock()
        self.listeners: dict[str, MemoryListener] = {}
        self.delay_s = delay_s if delay_s is not None else _at_once
        self.observe = observe
        self._hosts: dict[str, HostTransport] = {}
        self._cut: set[frozenset[str]] = set()
        self._waiting: dict[frozenset[str], list[_Pipe]] = {}

    def transport(self, host: str) -> HostTransport:
        """Return the transport of a new host, or of one that replaces a removed one."""
        with self.lock:
            transport = self._hosts[host] = HostTransport(self, host)
            return transport

    def cut(self, one: str, other: str) -> None:
        """Cut the link between two hosts; neither of them is notified."""
        with self.lock:
            self._cut.add(frozenset((one, other)))

    def heal(self, one: str, other: str) -> None:
        """Heal the link between two hosts; what has waited arrives, in order."""
        with self.lock:
            link = frozenset((one, other))
            self._cut.discard(link)
            for pipe in self._waiting.pop(link, []):
                pipe.schedule()

    def disconnect(self, one: str, other: str) -> None:
        """Break the connections between two hosts; both are notified, and may dial again."""
        with self.lock:
            for source, target in ((one, other), (other, one)):
                for stream in self._streams_of(source):
                    if stream.peer_host == target:
                        stream.reset()

    def remove(self, host: str) -> None:
        """Remove a host as if its process were killed: the others see their connections end."""
        with self.lock:
            transport = self._hosts.pop(host, None)
            if transport is not None:
                transport.die()

    def holds_back(self, pipe: _Pipe) -> bool:
        """Return whether a link is cut; if so, the pipe's next packet waits until it is healed."""
        link = frozenset((pipe.source.host, pipe.target.host))
        if link not in self._cut:
            return False
        self._waiting.setdefault(link, []).append(pipe)
        return True

    def _streams_of(self, host: str) -> list[MemoryStream]:
        transport = self._hosts.get(host)
        users = [] if transport is None else transport.users
        return [user for user in users if isinstance(user, MemoryStream)]


class HostTransport:
    """The transport of one host, with one thread for all callbacks.

    Args:
        network: the network.
        host: the host's name.
    """

    def __init__(self, network: StreamNetwork, host: str) -> None:
        self.network = network
        self.host = host
        self.users: dict[MemoryStream | MemoryListener, None] = {}
        self._changed = threading.Condition(network.lock)
        self._calls: list[tuple[float, int, Call]] = []
        self._order = itertools.count()
        self._thread: Running | None = None
        self._is_dead = False

    def dial(self, address: str, *, timeout_s: float) -> MemoryStream:
        """Connect to an address, without waiting."""
        network = self.network
        with network.lock:
            self._check_alive()
            stream = MemoryStream(self, address)
            self.add_user(stream)
            self.call_at(network.clock.now() + timeout_s, partial(stream.on_late, timeout_s))
            listener = network.listeners.get(address)
            if listener is None:
                self.call_at(network.clock.now(), stream.on_refused)
            else:
                stream.connect(listener)
            return stream

    def listen(self, address: str, on_connection: OnConnection) -> MemoryListener:
        """Listen on an address.

        Raises:
            TransportError: if the address already has a listener.
        """
        with self.network.lock:
            self._check_alive()
            if address in self.network.listeners:
                raise TransportError(f"could not listen on {address}: it already has a listener")
            listener = MemoryListener(self, address, on_connection)
            self.network.listeners[address] = listener
            self.add_user(listener)
            return listener

    def close(self, *, timeout_s: float) -> bool:
        """Close all connections and listeners, and wait for the end of the thread."""
        with self.network.lock:
            for user in list(self.users):
                user.close()
            thread = self._thread
            if thread is None or thread.is_current():
                return thread is None
            return self.network.clock.wait_for(
                self._changed, lambda: self._thread is None, timeout_s
            )

    def add_user(self, user: MemoryStream | MemoryListener) -> None:
        """Run the thread as long as this object is in use; called with the network's lock held."""
        self.users[user] = None
        self._start()

    def remove_user(self, user: MemoryStream | MemoryListener) -> None:
        """Release an object; called with the network's lock held."""
        self.users.pop(user, None)
        self._changed.notify_all()

    def call_at(self, when: float, call: Call) -> None:
        """Call a function on the thread; called with the network's lock held."""
        if self._is_dead:
            return
        heapq.heappush(self._calls, (when, next(self._order), call))
        self._start()
        self._changed.notify_all()

    def call(self, call: Call) -> None:
        """Call a function soon; called with the network's lock held."""
        self.call_at(self.network.clock.now(), call)

    def die(self) -> None:
        """Stop without calling anything; called with the network's lock held."""
        self._is_dead = True
        for user in list(self.users):
            user.die()
        self.users.clear()
        self._calls.clear()
        self._changed.notify_all()

    def _check_alive(self) -> None:
        if self._is_dead:
            raise TransportError(f"the host {self.host} has been removed")

    def _start(self) -> None:
        if self._thread is None and not self._is_dead:
            self._thread = self.network.clock.spawn(self._run, name=f"router-io-{self.host}")

    def _run(self) -> None:
        while (call := self._next()) is not None:
            try:
                call()
            except Exception:
                _logger.exception("a callback on the host %s failed", self.host)

    def _next(self) -> Call | None:
        """Wait for the next call that is due; None without users."""
        clock = self.network.clock
        with self.network.lock:
            while True:
                if self._is_dead or (not self.users and not self._has_due()):
                    self._thread = None
                    self._calls.clear()
                    self._changed.notify_all()
                    return None
                if self._has_due():
                    return heapq.heappop(self._calls)[2]
                at = self._calls[0][0] if self._calls else None
                clock.wait_for(
                    self._changed,
                    partial(self._may_continue, at),
                    None if at is None else at - clock.now(),
                )

    def _has_due(self) -> bool:
        return bool(self._calls) and self._calls[0][0] <= self.network.clock.now()

    def _may_continue(self, planned: float | None) -> bool:
        if self._is_dead or not self.users:
            return True
        return bool(self._calls) and (planned is None or self._calls[0][0] < planned)


class _Pipe:
    """One direction of a connection: packets that arrive in order.

    A packet is a function that is called on the thread of the target.
    """

    def __init__(self, source: HostTransport, target: HostTransport) -> None:
        self.source = source
        self.target = target
        self._packets: deque[Call] = deque()
        self._last_arrival = 0.0

    def send(self, packet: Call) -> None:
        """Send a packet; called with the network's lock held."""
        self._packets.append(packet)
        self.schedule()

    def schedule(self) -> None:
        """Let the next packet arrive; called with the network's lock held."""
        if not self.target.users:
            # Its side of the connection is closed.
            return
        network = self.source.network
        arrival = network.clock.now() + network.delay_s(self.source.host, self.target.host)
        self._last_arrival = max(self._last_arrival, arrival)
        self.target.call_at(self._last_arrival, self._arrive)

    def _arrive(self) -> None:
        with self.source.network.lock:
            if self.source.network.holds_back(self):
                return
            packet = self._packets.popleft()
        packet()


class MemoryStream:
    """One side of a connection; see :class:`~dmiddleware.router.transport.stream.Stream`."""

    def __init__(self, transport: HostTransport, address: str, pipe: _Pipe | None = None) -> None:
        self._transport = transport
        self._lock = transport.network.lock
        self._address = address
        self._pipe = pipe
        self._peer: MemoryStream | None = None
        self._is_connected = False
        self._error: RouterError | None = None
        self._arrived = bytearray()
        self._has_ended = False
        self._targets: Sequence[memoryview] = ()
        self._on_bytes: OnBytes | None = None
        self._unsent: deque[bytes] = deque()
        self._on_sent: OnSent | None = None
        self._in_flight = 0

    @property
    def host(self) -> str:
        """The host of this side."""
        return self._transport.host

    @property
    def peer_host(self) -> str | None:
        """The host of the other side; None until they are connected."""
        return None if self._pipe is None else self._pipe.target.host

    def send(self, pieces: Sequence[Piece], on_sent: OnSent) -> bool:
        """Send bytes; return whether the connection holds all of them."""
        with self._lock:
            if self._on_sent is not None:
                raise RouterStateError("a stream sends one list of pieces at a time")
            if self._error is not None:
                self._report(partial(on_sent, self._error))
                return False
            self._unsent.append(b"".join(pieces))
            if self._move():
                return True
            self._on_sent = on_sent
            return False

    def receive(self, targets: Sequence[memoryview], on_bytes: OnBytes) -> None:
        """Receive the next bytes."""
        with self._lock:
            if self._on_bytes is not None:
                raise RouterStateError("a stream receives one list of targets at a time")
            self._targets, self._on_bytes = targets, on_bytes
            if self._arrived or self._has_ended or self._error is not None:
                self._transport.call(self._pass_on)

    def close(self) -> None:
        """Close the connection, without waiting."""
        with self._lock:
            if self not in self._transport.users:
                return
            self._end(TransportError(f"the connection with {self._address} is closed"))
            self.die()
            self._transport.remove_user(self)

    def connect(self, listener: MemoryListener) -> None:
        """Ask a listener for a connection; called with the network's lock held."""
        there, back = (
            _Pipe(self._transport, listener.transport),
            _Pipe(listener.transport, self._transport),
        )
        self._pipe = there
        there.send(partial(listener.on_dialed, self, back))

    def on_connected(self) -> None:
        """Start what has waited for the connection."""
        with self._lock:
            self._is_connected = True
            self._continue_sending()

    def on_refused(self) -> None:
        """Note that nobody listens on the address."""
        with self._lock:
            self._end(TransportError(f"could not dial {self._address}: connection refused"))

    def on_late(self, timeout_s: float) -> None:
        """Give up unless the two sides are connected by now."""
        with self._lock:
            if not self._is_connected:
                self._end(
                    TransportError(
                        f"could not dial {self._address}: no connection within {timeout_s:g} s"
                    )
                )

    def on_arrived(self, content: bytes) -> None:
        """Take bytes that have arrived."""
        with self._lock:
            self._arrived += content
            if (observe := self._transport.network.observe) is not None:
                observe(self, content)
        self._pass_on()

    def on_ended(self) -> None:
        """Note that the other side has closed the connection; what has arrived before counts."""
        with self._lock:
            self._has_ended = True
            if not self._arrived:
                self._end(TransportError(f"the connection with {self._address} has ended"))

    def on_room(self, n_bytes: int) -> None:
        """Note that the other side has received some bytes; called with the lock held."""
        self._in_flight -= n_bytes
        self._continue_sending()

    def reset(self) -> None:
        """Break the connection at once; called with the lock held."""
        self._end(TransportError(f"the connection with {self._address} broke: connection reset"))

    def die(self) -> None:
        """Notify the other side of the end; called with the lock held."""
        if self._pipe is not None:
            self._pipe.send(self._notify_peer)

    def accept(self, dialer: MemoryStream) -> None:
        """Become the listener's side; called with the lock held."""
        self._peer, self._is_connected = dialer, True
        dialer._peer = self

    def _notify_peer(self) -> None:
        # A dialer may have been closed before the listener has made the other side.
        if self._peer is not None:
            self._peer.on_ended()

    def _move(self) -> bool:
        """Move bytes into the connection while it holds more; return whether none is left."""
        while self._unsent and self._is_connected and self._in_flight < CAPACITY_BYTES:
            content = self._unsent.popleft()
            n_bytes = min(len(content), CAPACITY_BYTES - self._in_flight)
            if n_bytes < len(content):
                self._unsent.appendleft(content[n_bytes:])
            self._in_flight += n_bytes
            assert self._pipe is not None and self._peer is not None
            self._pipe.send(partial(self._peer.on_arrived, content[:n_bytes]))
        return not self._unsent

    def _continue_sending(self) -> None:
        if self._on_sent is not None and self._error is None and self._move():
            on_sent, self._on_sent = self._on_sent, None
            self._report(partial(on_sent, None))

    def _pass_on(self) -> None:
        with self._lock:
            on_bytes = self._on_bytes
            if on_bytes is None:
                return
            outcome: int | RouterError
            if self._error is not None:
                outcome = self._error
            elif self._arrived:
                outcome = self._fill()
            else:
                return
            self._targets, self._on_bytes = (), None
        self._guarded(partial(on_bytes, outcome))

    def _fill(self) -> int:
        n_bytes = fill(self._targets, self._arrived)
        del self._arrived[:n_bytes]
        if self._peer is not None:
            self._peer.on_room(n_bytes)
        if self._has_ended and not self._arrived:
            self._end(TransportError(f"the connection with {self._address} has ended"))
        return n_bytes

    def _end(self, error: RouterError) -> None:
        """End the connection and fail what is pending; only the first error counts."""
        if self._error is not None:
            return
        self._error = error
        self._arrived.clear()
        self._unsent.clear()
        if self._on_sent is not None:
            self._report(partial(self._on_sent, error))
            self._on_sent = None
        if self._on_bytes is not None:
            self._transport.call(self._pass_on)

    def _report(self, call: Call) -> None:
        self._transport.call(partial(self._guarded, call))

    def _guarded(self, call: Call) -> None:
        try:
            call()
        except Exception:
            _logger.exception("closed the connection with %s, its callback failed", self._address)
            self.close()


class MemoryListener:
    """An address of a host."""

    def __init__(self, transport: HostTransport, address: str, on_connection: OnConnection) -> None:
        self.transport = transport
        self.address = address
        self._on_connection = on_connection

    def on_dialed(self, dialer: MemoryStream, back: _Pipe) -> None:
        """Accept a connection, or refuse it if this listener is closed."""
        network = self.transport.network
        with network.lock:
            if network.listeners.get(self.address) is not self:
                back.send(dialer.on_refused)
                return
            stream = MemoryStream(self.transport, self.address, back)
            stream.accept(dialer)
            self.transport.add_user(stream)
            back.send(dialer.on_connected)
        try:
            self._on_connection(stream)
        except Exception:
            _logger.exception("closed a connection to %s, its callback failed", self.address)
            stream.close()

    def close(self) -> None:
        """Stop listening; accepted connections stay open."""
        with self.transport.network.lock:
            self.die()
            self.transport.remove_user(self)

    def die(self) -> None:
        """Vanish; called with the network's lock held."""
        network = self.transport.network
        if network.listeners.get(self.address) is self:
            del network.listeners[self.address]
