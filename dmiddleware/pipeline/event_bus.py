"""The event bus: it runs handlers one at a time, in order of emission, on its own thread."""

from __future__ import annotations

import dataclasses
import functools
import logging
import threading
from collections.abc import Callable, Collection, Mapping
from fnmatch import fnmatchcase
from typing import Any, Final, NamedTuple, Protocol, TypeAlias

from dmiddleware.errors import EventError, EventQueueFull, NoSubscriber, WaitTimeout
from dmiddleware.event_names import base_name, scoped_name, task_number
from dmiddleware.event_values import copied_arguments
from dmiddleware.pipeline.clock import Clock, Running, SystemClock
from dmiddleware.pipeline.event import (
    Emission,
    Event,
    EventCounters,
    EventQueue,
    Handler,
    QueuedEvent,
)

__all__ = ["Accept", "Done", "EventBus", "EventRouter", "PeerTask"]

_logger = logging.getLogger(__name__)

_MEMBERSHIP: Final = frozenset(("node.joined", "node.left", "node.rejoined", "node.forgotten"))
"""What the router itself tells every task."""


_undeclared: Final = functools.lru_cache(maxsize=1024)(Event)
"""Returns the event of a name that has no contract of its own."""


Done: TypeAlias = Callable[[bool], None]
"""Called with True when an event was handled, in the events' order, or with False if this program
will never handle it."""

Accept: TypeAlias = Callable[[str, tuple[Any, ...], dict[str, Any], Done | None, bool], bool]
"""Accepts an event from another process: its name, its arguments, what to call when it was handled
if its sender waits for that, and whether to wait for room. Returns False if the queue is full."""


class PeerTask(NamedTuple):
    """In which task of its program a peer is.

    Attributes:
        roles: its roles.
        number: the newest task for which it is ready; 0: for none yet.
        takes_part: whether it takes part in a certain task.
    """

    roles: tuple[str, ...]
    number: int
    takes_part: bool


class EventRouter(Protocol):
    """What a task needs from a router, which carries events between processes."""

    @property
    def node_id(self) -> int:
        """The number of this process in the run."""
        ...

    @property
    def incarnation(self) -> int:
        """Orders this process among all that have used its node id; it may grow."""
        ...

    @property
    def labels(self) -> Collection[str]:
        """The labels of this process."""
        ...

    def attach(self, accept: Accept) -> None:
        """Call this function for each event that arrives."""
        ...

    def subscribe(self, name: str, *, active: bool) -> None:
        """Start, or stop, receiving the event from the peers."""
        ...

    def suspend(self) -> None:
        """Accept no more events until :meth:`attach` is called; the peers keep them meanwhile."""
        ...

    def emit(
        self,
        event: Event,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        to: Collection[int] | None = None,
    ) -> None:
        """Send the event to the peers that subscribed to it, as its contract says.

        Args:
            event: the event.
            args: positional arguments for the handlers.
            kwargs: keyword arguments for the handlers.
            to: node ids of the only peers that may receive it; None: all peers.

        Raises:
            NoSubscriber: if the event is required, and no peer, or not each of ``to``, has
                subscribed to it.
        """
        ...

    def peer_ids(self) -> Collection[int]:
        """Return the node ids of the connected peers."""
        ...

    def subscribers(self, name: str, *, timeout_s: float = 0.0) -> Collection[int]:
        """Return the node ids of the peers that subscribe to an event.

        Args:
            name: the event.
            timeout_s: how long to wait for connected peers that have announced nothing yet.
        """
        ...

    def counters(self) -> Mapping[str, float]:
        """Return counters of sent and received data, by event and by peer, for logging."""
        ...

    def wait_until_ready(self, *, stopped: Callable[[], bool], task: int = 1) -> bool:
        """Wait until the peers are ready to receive the events of a task.

        Args:
            stopped: ends the wait early when it returns True.
            task: the number of the task in its program.

        Returns:
            False if the task is over, because all peers have gone on to a later one.
        """
        ...

    def peer_tasks(self, sign: str) -> Mapping[int, PeerTask]:
        """Return in which of their tasks the connected peers are, by node id.

        Args:
            sign: the event that a peer subscribes to as long as it takes part in a certain task.
        """
        ...


class EventBus:
    """Carries events to handlers, and, with a router, to other processes.

    A handler gets every emission between its registration and its removal once, in order. The
    thread starts with the first emission that has a handler.

    The buses of a program that runs several tasks one after the other exchange their events under
    different names, so that no event of one task reaches another task.

    Args:
        name: names the thread.
        clock: measures deadlines and starts the thread.
        router: carries events from and to other processes.
        task: which task of its program the bus belongs to, from 1.
    """

    def __init__(
        self,
        *,
        name: str = "events",
        clock: Clock | None = None,
        router: EventRouter | None = None,
        task: int = 1,
    ) -> None:
        self._name = name
        self._task = task
        self._scoped: dict[str, Event] = {}
        self._clock = clock if clock is not None else SystemClock()
        self._router = router
        self._changed = threading.Condition()
        self._queue = EventQueue()
        self._events: dict[str, Event] = {}
        self._handlers: dict[str, tuple[Handler, ...]] = {}
        self._errors: list[BaseException] = []
        self._running: QueuedEvent | None = None
        self._thread: Running | None = None
        self._closing = False
        self._routing = threading.Lock()
        if router is not None:
            router.attach(self._accept_remote)

    @property
    def has_errors(self) -> bool:
        """Whether there are errors of handlers that :meth:`take_errors` has not returned yet."""
        return bool(self._errors)

    def on(self, event: str | Event, function: Callable[..., object]) -> None:
        """Call the function for every emission of the event from now on.

        Raises:
            EventError: if the event was declared with another contract, or has an invalid name.
        """
        self._add(event, function, once=False)

    def once(self, event: str | Event, function: Callable[..., object]) -> None:
        """Call the function for the next emission of the event only."""
        self._add(event, function, once=True)

    def off(self, event: str | Event, function: Callable[..., object] | None = None) -> int:
        """Remove handlers, also for emissions that are still in the queue.

        Args:
            event: the event, or a glob pattern of names (``"node.*"``).
            function: the handler to remove; None means all.

        Returns:
            How many registrations were removed.
        """
        pattern = event.name if isinstance(event, Event) else event
        with self._changed:
            chosen = [
                (name, handler)
                for name, handlers in self._handlers.items()
                for handler in handlers
                if fnmatchcase(name, pattern) and (function is None or handler.function == function)
            ]
            for name, handler in chosen:
                self._remove(name, handler)
        for name in {name for name, _ in chosen}:
            self._update_subscription(name)
        return len(chosen)

    def emit(
        self,
        event: str | Event,
        *args: Any,
        only_local: bool = False,
        only_remote: bool = False,
        to: int | Collection[int] | None = None,
        **kwargs: Any,
    ) -> None:
        """Emit an event to its handlers in this process and, with a router, in other processes.

        Returns when the event is accepted, before the handlers have run. They receive copies of
        arrays, tensors, and the dictionaries, lists and tuples that hold them, without gradients,
        so the caller may change these at once, and so may a handler. In this process, objects of
        other classes are passed as they are; the router refuses most of them.

        If the queue of a reliable event is full, it waits until the event's deadline. Within a
        handler it never waits, but can use a reserve as large as the queue.

        Args:
            event: the event.
            args: positional arguments for the handlers.
            only_local: do not send the event to other processes.
            only_remote: do not call handlers in this process.
            to: node ids of the only processes that receive the event, this one included if it is
                among them; None: all processes.
            kwargs: keyword arguments for the handlers.

        Raises:
            EventQueueFull: when the queue is still full at the deadline.
            NoSubscriber: when the event is required, and no handler, or none in one of the
                processes ``to``, would receive it.
            EventError: when the bus is closed.
        """
        if only_local and only_remote:
            raise EventError("an event cannot be both only_local and only_remote")
        declared = self._resolve(event)
        for_here, for_peers = not only_remote, self._router is not None and not only_local
        peers: Collection[int] | None = None
        if to is not None:
            nodes = {to} if isinstance(to, int) else set(to)
            node_id = 0 if self._router is None else self._router.node_id
            peers = nodes - {node_id}
            for_here, for_peers = for_here and node_id in nodes, for_peers and bool(peers)
        received = for_here and bool(self._handlers.get(declared.name))
        if declared.required and not received and (not for_peers or (for_here and to is not None)):
            raise NoSubscriber(
                f"the event {declared.name!r} is required, but has no handler in this process; "
                "register one with on() before it is emitted, or declare it with required=False"
            )
        if self._router is not None and for_peers:
            try:
                scoped = declared if self._task == 1 else self._scope(declared)
                self._router.emit(scoped, args, kwargs, to=peers)
            except NoSubscriber:
                # Without named nodes, a handler in one process is enough.
                if to is not None or not received:
                    raise
        if for_here:
            if received:
                args, kwargs = copied_arguments(args, kwargs)
            self._accept(declared, Emission(args, kwargs))

    def wait_for(
        self,
        event: str | Event,
        *,
        timeout_s: float,
        interruption: Callable[[], BaseException | None] = lambda: None,
    ) -> Emission:
        """Wait for the next emission of the event, until its handlers have run.

        Args:
            event: the event.
            timeout_s: the most seconds to wait.
            interruption: returns the exception with which to end the wait, or None; called again
                after each :meth:`wake`.

        Returns:
            The arguments of the emission.

        Raises:
            WaitTimeout: when the event was not emitted in time.
            EventError: within a handler, which would wait for itself; or when the bus is closed.
            BaseException: the interruption.
        """
        name = self._resolve(event).name
        self._refuse_in_handler(f"wait_for({name!r})")
        arrived: list[Emission] = []

        def take(*args: Any, **kwargs: Any) -> None:
            arrived.append(Emission(args, kwargs))

        handler = self._add(event, take, once=True)
        try:
            with self._changed:
                self._clock.wait_for(
                    self._changed,
                    lambda: (
                        self._closing
                        # An emission that is being handled counts as arrived, whatever the handlers
                        # before this one interrupt.
                        or (
                            not self._is_running(handler)
                            and (bool(arrived) or interruption() is not None)
                        )
                    ),
                    timeout_s,
                )
        finally:
            with self._changed:
                self._remove(name, handler)
            self._update_subscription(name)
        if arrived:
            return arrived[0]
        if self._closing:
            raise EventError(f"the task was closed while it waited for the event {name!r}")
        interrupted = interruption()
        if interrupted is not None:
            raise interrupted
        raise WaitTimeout(
            f"the event {name!r} was not emitted within {timeout_s:g} s; check that it is emitted, "
            "and not before the wait starts"
        )

    def subscribers(self, event: str | Event, *, timeout_s: float = 0.0) -> Collection[int]:
        """Return the node ids of the peers that subscribe to an event of this task.

        Args:
            event: the event.
            timeout_s: how long to wait for connected peers that have announced nothing yet.
        """
        if self._router is None:
            return ()
        name = scoped_name(self._resolve(event).name, self._task)
        return self._router.subscribers(name, timeout_s=timeout_s)

    def wake(self) -> None:
        """Let every :meth:`wait_for` check for an interruption; signal handlers may call it."""
        with self._changed:
            self._changed.notify_all()

    def drain(self, *, timeout_s: float) -> None:
        """Wait until every event that was accepted has been handled.

        Raises:
            WaitTimeout: when that takes longer; it names the events that are left.
            EventError: within a handler, which would wait for itself.
        """
        if self._thread is None:
            return
        self._refuse_in_handler("sync()")
        with self._changed:
            if not self._clock.wait_for(
                self._changed, lambda: not self._queue.items and self._running is None, timeout_s
            ):
                raise WaitTimeout(f"after {timeout_s:g} s, {self._unfinished()}")

    def take_errors(self) -> list[BaseException]:
        """Return, and clear, the errors of handlers; notes name the events."""
        with self._changed:
            errors, self._errors = self._errors, []
        return errors

    def counters(self) -> dict[str, EventCounters]:
        """Return a copy of the counters of every event that has had a handler."""
        with self._changed:
            return {
                name: dataclasses.replace(counters)
                for name, counters in self._queue.counters.items()
            }

    def close(self, *, timeout_s: float = 10.0, in_order: bool = True) -> None:
        """Handle what was accepted, accept nothing more, and end the thread; may be called twice.

        Args:
            timeout_s: the most seconds to wait for handlers.
            in_order: False if this process fails or is interrupted, and another one may replace it:
                the peers then keep their events for it.

        Raises:
            WaitTimeout: when that takes longer; it names the events that are left.
            EventError: within a handler, which would wait for itself.
        """
        self._refuse_in_handler("close()")
        if not in_order and self._router is not None and not self._closing:
            self._router.suspend()
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        for name in list(self._handlers):
            self._update_subscription(name)
        thread = self._thread
        if thread is None:
            return
        if not thread.join(timeout_s):
            with self._changed:
                raise WaitTimeout(f"after {timeout_s:g} s of closing, {self._unfinished()}")
        self._thread = None

    def _add(self, event: str | Event, function: Callable[..., object], *, once: bool) -> Handler:
        if not callable(function):
            raise EventError(f"a handler must be callable, got {function!r}")
        name = self._resolve(event).name
        handler = Handler(function, once=once)
        with self._changed:
            handlers = self._handlers.get(name, ())
            self._handlers[name] = (*handlers, handler)
        if not handlers:
            self._update_subscription(name)
        return handler

    def _remove(self, name: str, handler: Handler) -> None:
        """Remove a registration; the caller holds the condition."""
        handler.active = False
        handlers = self._handlers.get(name, ())
        self._handlers[name] = tuple(
            registered for registered in handlers if registered is not handler
        )

    def _update_subscription(self, name: str) -> None:
        """Subscribe to the event at the router, or unsubscribe, depending on its handlers.

        The caller must not hold the condition: the router may be waiting for it.
        """
        if self._router is not None:
            with self._routing:
                is_heard = bool(self._handlers.get(name)) and not self._closing
                name = name if name in _MEMBERSHIP else scoped_name(name, self._task)
                self._router.subscribe(name, active=is_heard)

    def _scope(self, event: Event) -> Event:
        """Return the event under the name that its task uses, if that is not the first one."""
        scoped = self._scoped.get(event.name)
        if scoped is None:
            name = scoped_name(event.name, self._task)
            scoped = self._scoped[event.name] = dataclasses.replace(event, name=name)
        return scoped

    def _resolve(self, event: str | Event) -> Event:
        """Return the event of a name; an :class:`Event` declares its contract."""
        if isinstance(event, Event):
            declared = self._events.setdefault(event.name, event)
            if declared != event:
                raise EventError(
                    f"the event {event.name!r} was declared before as {declared}, and now as "
                    f"{event}; declare it once and use that object everywhere"
                )
            return event
        return self._events.get(event) or _undeclared(event)

    def _accept_remote(
        self,
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        done: Done | None,
        waits: bool,
    ) -> bool:
        """Accept an event from another process; return False if its queue is full."""
        if name not in _MEMBERSHIP:
            number = task_number(name)
            if number != self._task:
                _logger.debug("event %r arrived in task %d", name, self._task)
                if done is not None:
                    # An event of a later task waits for that task.
                    done(number < self._task)
                return True
            name = base_name(name)
        try:
            has_handler = self._accept(self._resolve(name), Emission(args, kwargs), done, waits)
        except EventQueueFull:
            return False
        except EventError:
            # The sender did not know yet that this task is closed.
            _logger.debug("event %r arrived from another process after the task was closed", name)
            with self._changed:
                self._queue.counters.setdefault(name, EventCounters()).dropped += done is None
            if done is not None:
                done(False)
        else:
            if done is not None and not has_handler:
                done(True)
        return True

    def _accept(
        self,
        event: Event,
        emission: Emission,
        done: Done | None = None,
        waits: bool = True,
    ) -> bool:
        """Queue an emission; return whether it has a handler."""
        with self._changed:
            if self._closing and not self._is_in_handler():
                raise _closed(event)
            handlers = self._handlers.get(event.name)
            if not handlers:
                return False
            item = QueuedEvent(event, emission, handlers, done)
            # A lossy event never waits for room, so a handler may use the reserve for it at once.
            reserve = event.delivery == "lossy" and self._is_in_handler()
            if not self._queue.offer(item, reserve=reserve):
                self._wait_for_room(item, waits=waits)
            if self._thread is None:
                self._thread = self._clock.spawn(self._work, name=self._name)
            self._changed.notify_all()
        return True

    def _wait_for_room(self, item: QueuedEvent, *, waits: bool) -> None:
        event, in_handler = item.event, self._is_in_handler()
        if in_handler:
            accepted = self._queue.offer(item, reserve=True)
        else:
            accepted = waits and self._clock.wait_for(
                self._changed, lambda: self._closing or self._queue.offer(item), event.timeout_s
            )
        if accepted and self._closing and not in_handler:
            raise _closed(event)
        if not accepted:
            raise EventQueueFull(self._full(event, in_handler=in_handler))

    def _work(self) -> None:
        while (item := self._next()) is not None:
            for handler in item.handlers:
                self._call(item, handler)
            if item.done is not None:
                item.done(True)

    def _next(self) -> QueuedEvent | None:
        with self._changed:
            self._running = None
            self._changed.notify_all()
            while (item := self._queue.take()) is None:
                if self._closing:
                    return None
                self._clock.wait_for(
                    self._changed, lambda: self._closing or bool(self._queue.items), None
                )
            self._running = item
            self._changed.notify_all()
            self._queue.counters[item.event.name].handled += 1
            return item

    def _call(self, item: QueuedEvent, handler: Handler) -> None:
        name = item.event.name
        with self._changed:
            if not handler.active:
                return
            if handler.once:
                self._remove(name, handler)
        if handler.once:
            self._update_subscription(name)
        try:
            handler.function(*item.emission.args, **item.emission.kwargs)
        except BaseException as error:
            error.add_note(f"in handler {_name(handler.function)} of the event {name!r}")
            _logger.debug("a handler of %r failed", name, exc_info=error)
            with self._changed:
                self._errors.append(error)
                self._queue.counters[name].failed += 1

    def _is_in_handler(self) -> bool:
        return self._thread is not None and self._thread.is_current()

    def _refuse_in_handler(self, what: str) -> None:
        if self._is_in_handler():
            raise EventError(
                f"{what} within an event handler would wait for the handler itself; call it in a "
                "middleware, or register another handler"
            )

    def _is_running(self, handler: Handler) -> bool:
        return self._running is not None and handler in self._running.handlers

    def _doing(self) -> str:
        assert self._running is not None
        functions = ", ".join(_name(handler.function) for handler in self._running.handlers)
        return f"the handlers of {self._running.event.name!r} ({functions}) are still running"

    def _full(self, event: Event, *, in_handler: bool) -> str:
        limit = 2 * event.capacity if in_handler else event.capacity
        waited = "" if in_handler else f", and still was after {event.timeout_s:g} s"
        busy = f"; {self._doing()}" if self._running else ""
        return (
            f"the queue of the event {event.name!r} is full with {limit} emissions{waited}{busy}. "
            "Emit less often, make the handlers faster, or declare the event with a larger "
            'capacity or delivery="lossy"'
        )

    def _unfinished(self) -> str:
        parts = [self._doing()] if self._running is not None else []
        parts += [f"{n} of {name!r} are queued" for name, n in self._queue.waiting().items()]
        return "some events are still not handled: " + "; ".join(parts)


def _closed(event: Event) -> EventError:
    return EventError(f"the event {event.name!r} was emitted after the task was closed")


def _name(function: Callable[..., object]) -> str:
    return getattr(function, "__qualname__", None) or repr(function)
