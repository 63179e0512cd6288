"""The task: it runs a chain of middleware, step after step."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, Self, cast

from dmiddleware.errors import EventError, TaskStateError
from dmiddleware.pipeline.branches import Branches, branch_failure
from dmiddleware.pipeline.by_hand import Layer, Wrapped
from dmiddleware.pipeline.clock import Clock, SystemClock
from dmiddleware.pipeline.context import Context
from dmiddleware.pipeline.current_node import current_node, refuse_to_run_alone
from dmiddleware.pipeline.describe import ChainTable, describe_chain
from dmiddleware.pipeline.event import Emission, Event
from dmiddleware.pipeline.event_bus import EventBus, EventRouter
from dmiddleware.pipeline.lifecycle import Lifecycle, StopRequest
from dmiddleware.pipeline.middleware import (
    Declarations,
    Middleware,
    Wrapper,
    middleware_name,
    middleware_object,
    string_tuple,
)
from dmiddleware.pipeline.onion import Chain, OnError, SkipRest, merge_errors
from dmiddleware.pipeline.peers import Peers
from dmiddleware.pipeline.plan import (
    Compiler,
    Entry,
    Group,
    Lock,
    Place,
    PlanItem,
    leaves,
    make_entry,
    make_plan,
    parts_of,
    roles_of_part,
)
from dmiddleware.pipeline.preflight import ChainCheck, ChainView
from dmiddleware.process.signals import HeldSignals
from dmiddleware.seeding import derive_seed

__all__ = ["Task"]

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    C = TypeVar("C", bound=Context, default=Any)
else:
    from typing import TypeVar

    C = TypeVar("C", bound=Context)

_logger = logging.getLogger(__name__)


_NOT_GIVEN: Any = object()


class Task(Generic[C]):
    """Runs a chain of middleware on a context, step after step.

    Use it in a ``with``: at the end, the middleware are closed in reverse order, also after an
    error. A task without roles runs the whole chain; one with roles skips the middleware that are
    for other roles only.

    Args:
        ctx: the context of the first step. By default it is the ``default_context`` of the first
            middleware that declares one, as the stock middleware do, and before that a plain
            :class:`Context`.
        router: carries events between processes; None: the router of the current node (see
            :func:`~dmiddleware.pipeline.running_as`), if there is one.
        roles: the roles of this process in the run; none: those of the current node.
        seed: the seed of the run, from which :meth:`seed_for` derives all others.
        labels: names by which this process can be selected, in addition to the router's.
        rank: this process's number among those that run this task as one, with the same seed;
            None: it runs alone. Only rank 0 runs the middleware that declare ``lead_only = True``,
            such as loggers and savers of checkpoints.
        name: the task's name in messages.
        clock: measures deadlines; None: the clock of the current node, or of the machine.
        lock_timeout_s: the most seconds that a middleware waits for its lock.

    Attributes:
        labels: names by which this process can be selected.
        rank: this process's number among those that run this task as one; 0 if it runs alone.
        number: which task of the program this is, from 1: the n-th tasks of all processes are one.
            It counts the tasks that were built in a node of a run; elsewhere it is 1.

    Example:
        >>> def count(ctx: Context) -> None:
        ...     ctx.log("steps", ctx.total_step)
        >>> with Task(Context()) as task:
        ...     task.use(count).run(max_step=3)
        >>> task.ctx.total_step
        2
    """

    def __init__(
        self,
        ctx: C = _NOT_GIVEN,
        router: EventRouter | None = None,
        *,
        roles: Iterable[str] = (),
        seed: int = 0,
        labels: Iterable[str] = (),
        rank: int | None = None,
        name: str = "task",
        clock: Clock | None = None,
        lock_timeout_s: float = 600.0,
    ) -> None:
        if rank is not None and rank < 0:
            raise ValueError(f"rank must not be negative, got {rank}")
        self._has_default_context = ctx is _NOT_GIVEN
        if self._has_default_context:
            ctx = cast(C, Context())
        if not isinstance(ctx, Context):
            raise TypeError(
                f"Task(ctx) takes a Context, got {ctx!r}; leave it out for the default one, or "
                "pass an instance of a subclass of Context"
            )
        node = current_node() if router is None else None
        if node is not None:
            node.check_task(rank=rank)
        elif router is None:
            refuse_to_run_alone()
        self._node = node
        if node is not None:
            router, roles, labels = node.router, roles or node.roles, (*node.labels, *labels)
            clock = clock if clock is not None else node.clock
        self.ctx = ctx
        self.router = router
        self.seed = seed
        self.name = name
        self.clock: Clock = clock if clock is not None else SystemClock()
        self.number = 1
        if node is not None and router is not None:
            self.number = node.next_task_number()
        self.events = EventBus(
            name=f"{name} events", clock=self.clock, router=router, task=self.number
        )
        self.rank = rank or 0
        self._roles = frozenset(string_tuple(roles))
        place = ("standalone",) if router is None else ("distributed", *router.labels)
        self.labels = frozenset((*place, *string_tuple(labels)))
        self._lock = threading.RLock()
        self._lock_timeout_s = lock_timeout_s
        self._entries: list[Entry] = []
        self._by_hand: list[Entry] = []
        self._wrappers: list[Wrapper[C]] = []
        self._lifecycle = Lifecycle()
        self._parts: tuple[str, ...] | None = None
        self._part_tasks: dict[str, TaskOfPart[C]] = {}
        # Branches compiled for one call by hand end their threads when they are garbage-collected.
        self._branches: weakref.WeakSet[Branches] = weakref.WeakSet()
        self._chain: Chain | None = None
        self._layers: list[Layer] = []
        self._layers_lock = threading.Lock()
        self._at_step_end: list[Callable[[], object]] = []
        self._at_close: list[Callable[[], object]] = []
        self._at_stop: list[Callable[[], object]] = [self.events.wake]
        self._stop = StopRequest()
        self._held_stop: StopRequest | None = None
        self._failure = ""
        self._in_last_step = False
        self._is_running = False
        self._is_set_up = False
        self._step_done = False
        self._closed = False
        self._adopt(ctx)
        self._peers: Peers | None = None
        if router is not None:
            self._peers = Peers(
                router, self.events, number=self.number, node=node, on_stop=self._accept_stop
            )
        if node is not None:
            node.register(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
            return
        self._note_failure(error)
        closing = OnError(lambda error: merge_errors(error, self._close_all(), what="the task"))
        closing.__exit__(kind, error, traceback)

    @property
    def roles(self) -> frozenset[str]:
        """The roles of this process; none means all."""
        return self._roles

    @property
    def whole(self) -> Task[C]:
        """The task of the whole chain: this one, or the one that this is a part of."""
        return self

    def part(self, name: str) -> TaskOfPart[C]:
        """Return this task as the middleware of a named part of its chain see it."""
        if name not in self._part_tasks:
            self._part_tasks.setdefault(name, TaskOfPart(self, name))
        return self._part_tasks[name]

    @property
    def running(self) -> bool:
        """Whether :meth:`run` is running."""
        return self._is_running

    @property
    def closed(self) -> bool:
        """Whether the task was closed."""
        return self._closed

    def participants(self, *roles: str) -> list[int]:
        """Return the node ids of the connected peers that this task can wait for.

        These are the peers that take part in it or have not come to it yet, but not those whose
        part has ended.

        Args:
            roles: only peers that have one of these roles; none: all.
        """
        return [] if self._peers is None else self._peers.participants(roles)

    @property
    def ended_peers(self) -> Mapping[int, str]:
        """The nodes whose part of this task has ended, with the error if it has failed."""
        return {} if self._peers is None else self._peers.ended

    def later_tasks(self, *roles: str) -> dict[int, int]:
        """Return the connected peers that have gone on to a later task, and to which.

        Args:
            roles: only peers that have one of these roles; none: all.
        """
        return {} if self._peers is None else self._peers.later_tasks(roles)

    @property
    def finish(self) -> bool:
        """Whether the task was asked to stop; setting it to True stops it."""
        return self._stop.reason is not None

    @finish.setter
    def finish(self, value: bool) -> None:
        if not value:
            raise TaskStateError("a stopped task cannot be restarted; build a new one")
        self.stop("task.finish was set")

    @property
    def in_last_step(self) -> bool:
        """Whether this is a step after the stop, for middleware that declare ``last_step``."""
        return self._in_last_step

    @property
    def stop_reason(self) -> str | None:
        """Why the task was asked to stop, or None."""
        return self._stop.text

    @property
    def stopped_ok(self) -> bool:
        """Whether nothing has failed: False after ``stop(reason, ok=False)`` here or at a peer."""
        return self._stop.ok

    @property
    def ends_run(self) -> bool:
        """Whether the task was asked to stop together with the tasks of the peers."""
        return self._stop.reason is not None and not self._stop.only_local

    @property
    def decided_end(self) -> bool:
        """Whether the whole run ends because of this task, and not because of a peer's."""
        return self.ends_run and self._stop.origin is None

    def add_role(self, role: str) -> None:
        """Add a role of this process, from the next :meth:`run` on.

        Raises:
            TaskStateError: while the task runs, or when it is closed.
        """
        self._change("add_role")
        self._roles |= {role}

    def has_role(self, role: str) -> bool:
        """Return whether this process has the role; without any roles, it has them all."""
        return not self._roles or role in self._roles

    def roles_for(self, *roles: str) -> tuple[str, ...]:
        """Return the roles of the processes in which middleware with one of these roles run."""
        return roles

    def match_labels(self, patterns: str | Iterable[str]) -> bool:
        """Return whether any label matches any of the glob patterns (``"node.*"``)."""
        globs = string_tuple(patterns)
        return any(fnmatchcase(label, pattern) for label in self.labels for pattern in globs)

    def seed_for(self, *scope: str | int) -> int:
        """Derive the seed of one random generator from the run's seed.

        In a run of several processes, the seeds of each process depend on its node id, or, without
        a router, on its rank.

        Args:
            scope: identifies the generator in this process, from the outside in:
                ``("worker", 3)`` for the role and a number.

        Returns:
            An integer in ``[0, 2**31)``.
        """
        node: tuple[str | int, ...] = ()
        if self.router is not None:
            node = "node", self.router.node_id
        elif self.rank:
            node = "rank", self.rank
        return derive_seed(self.seed, *node, *scope)

    def use(
        self,
        mw: Middleware[C] | Wrapped[C],
        *,
        roles: Iterable[str] | None = None,
        lock: bool | Lock | None = None,
    ) -> Self:
        """Add a middleware to the end of the chain.

        Args:
            mw: the middleware.
            roles: the roles in which it is active, instead of those that it declares.
            lock: a lock to hold while its code runs, in either direction, or True for the lock of
                the task. Middleware that share a lock never run at the same time.

        Raises:
            MiddlewareError: if it cannot be a middleware.
            TaskStateError: while the task runs, or when it is closed.
        """
        self._change("use")
        self._entries.append(self._entry(mw, roles=roles, lock=lock))
        return self

    def use_wrapper(self, wrapper: Wrapper[C]) -> Self:
        """Apply a wrapper to every middleware of the chain, those in groups included.

        Args:
            wrapper: takes a middleware and returns one that adds something around it; several are
                applied in order, the first innermost. It may also have ``setup`` and ``close``.

        Raises:
            TaskStateError: while the task runs, or when it is closed.
        """
        self._change("use_wrapper")
        self._wrappers.append(wrapper)
        return self

    def serial(self, *mws: Middleware[C] | Wrapped[C]) -> Group:
        """Return one middleware that runs several in order, and back in reverse."""
        return self._group(mws, parallel=False)

    def parallel(self, *mws: Middleware[C] | Wrapped[C]) -> Group:
        """Return one middleware that runs several in parallel, each on its own thread.

        They share the context. The step continues when all of them are done; their errors are
        raised together as an ``ExceptionGroup``. On the way back they run in parallel again, each
        on its own thread, and all of them are done before the middleware before them is resumed.
        Use :meth:`serial` to run several middleware in one branch.
        """
        return self._group(mws, parallel=True)

    def wrap(self, mw: Middleware[C], *, lock: bool | Lock | None = None) -> Wrapped[C]:
        """Return a middleware in a form that another middleware can call.

        ``layer = wrapped(ctx)`` runs the way forward and ``layer.back()`` the way back; ``with
        wrapped(ctx): ...`` does both. Otherwise the way back runs at the end of the step.

        Raises:
            MiddlewareError: if it cannot be a middleware.
        """
        self._refuse_closed("wrap")
        entry = self._entry(mw, lock=lock)
        if not self._is_running:
            self._parts = None
            self._by_hand.append(entry)
        return self._wrap(entry)

    def forward(self, mw: Middleware[C], ctx: C | None = None) -> Layer:
        """Run the way forward of one middleware by hand.

        Args:
            mw: the middleware.
            ctx: the context, the task's by default.

        Returns:
            The layer; :meth:`backward` runs the way back of all open layers.
        """
        self._refuse_closed("forward")
        return self._wrap(self._entry(mw))(ctx if ctx is not None else self.ctx)

    def backward(self) -> None:
        """Run the way back of all layers that were called by hand, the last first.

        Raises:
            BaseException: the error of one of them, after it was thrown into the others.
        """
        with OnError(self._unwind_layers):
            while self._layers:
                self._layers.pop().back()

    def on(self, event: str | Event, function: Callable[..., object]) -> None:
        """Call the function for every emission of the event from now on.

        Handlers run one at a time, in the order of the emissions, on the thread of the event bus.
        :meth:`run` raises their errors at the end of the step.
        """
        self.events.on(event, function)

    def once(self, event: str | Event, function: Callable[..., object]) -> None:
        """Call the function for the next emission of the event only."""
        self.events.once(event, function)

    def off(self, event: str | Event, function: Callable[..., object] | None = None) -> int:
        """Remove handlers; see :meth:`EventBus.off`. Glob patterns are allowed.

        Returns:
            How many registrations were removed.
        """
        return self.events.off(event, function)

    def emit(
        self,
        event: str | Event,
        *args: Any,
        only_local: bool = False,
        only_remote: bool = False,
        to: int | Collection[int] | None = None,
        **kwargs: Any,
    ) -> None:
        """Emit an event; see :meth:`EventBus.emit`.

        Raises:
            EventQueueFull: when the queue is still full at the event's deadline.
            NoSubscriber: when the event is required, and no handler would receive it.
        """
        self.events.emit(
            event, *args, only_local=only_local, only_remote=only_remote, to=to, **kwargs
        )

    def wait_for(self, event: str | Event, timeout_s: float) -> Emission:
        """Wait for the next emission of the event.

        Returns:
            The arguments of the emission, as ``(args, kwargs)``.

        Raises:
            WaitTimeout: when the event was not emitted in time.
            SkipRest: when the running task is stopped; the rest of the step is skipped.
            EventError: when another branch of the same parallel fails; that error is the cause.
        """
        failure_beside = branch_failure()

        def interruption() -> BaseException | None:
            name = event.name if isinstance(event, Event) else event
            failure = failure_beside()
            if failure is not None:
                error = EventError(
                    f"stopped waiting for the event {name!r}: another branch of the parallel "
                    f"failed with {type(failure).__name__}"
                )
                error.__cause__ = failure
                return error
            if self._is_running and self._stop.reason is not None:
                return SkipRest(f"the task was stopped while it waited for the event {name!r}")
            return None

        return self.events.wait_for(event, timeout_s=timeout_s, interruption=interruption)

    def renew(self) -> Self:
        """Replace the context by the context of the next step; :meth:`run` does so itself."""
        self.ctx = self.ctx.renew()
        self._step_done = False
        return self

    def sync(self, *, timeout_s: float = 60.0) -> None:
        """Wait until all events that were emitted so far have been handled.

        Raises:
            WaitTimeout: when that takes longer.
            Exception: the errors of handlers.
        """
        self.events.drain(timeout_s=timeout_s)
        self._raise_event_errors()

    def check(self) -> None:
        """Check the chain, as :meth:`run` does before the first step.

        Raises:
            ChainError: with all problems at once, each with its remedy.
        """
        ChainCheck(
            self._plan(self._entries),
            self.ctx,
            self._roles,
            by_hand=self._plan(self._by_hand, by_hand=True),
            has_peers=self.router is not None,
            run_roles=None if self._node is None else self._node.run_roles,
        ).run()

    @property
    def chain(self) -> ChainView:
        """The chain as its middleware see it, with what they call by hand."""
        return self._view()

    def describe(self) -> ChainTable:
        """Return the chain as a table, which rich prints in color and ``str()`` as plain text."""
        roles = ", ".join(sorted(map(str, self._roles))) or "all roles"
        return describe_chain(f"{self.name}: {roles}", self._plan(self._entries))

    def run(self, max_step: int | None = None) -> None:
        """Run the chain until it is stopped with :meth:`stop`.

        First the chain is checked and compiled, and the middleware are bound to it and set up,
        unless they were before. A further run continues where the last one ended. At the end, all
        emitted events are handled. With a router, the first step waits until all expected peers are
        ready; if all of them have gone on to a later task of the program, as for a process that was
        restarted, this one runs no step. When the task is stopped, the data that peers had sent
        before is still delivered, in further steps of only those middleware that declare
        ``last_step``, and the tasks of the peers are stopped with the same reason.

        In the main thread, a first SIGINT (Ctrl-C) or SIGTERM stops the task after the current
        step, and the middleware can still save their state. A second one interrupts it at once.
        Handlers of these signals that the program has installed are left alone.

        Args:
            max_step: the most steps to run now; None means no limit.

        Raises:
            ChainError: before the first step, if the chain cannot run.
            TaskStateError: if the task is running or closed, or if another task of this node runs.
            KeyboardInterrupt: after a SIGINT, once the run has ended.
            SystemExit: after a SIGTERM, with exit code 143.
            BaseException: the error of a middleware or an event handler; notes name the middleware,
                or the event, and the step.
        """
        if max_step is not None and max_step < 0:
            raise ValueError(f"max_step must not be negative, got {max_step}")
        self._change("run", keep_chain=True)
        turn = contextlib.nullcontext() if self._node is None else self._node.running(self)
        with turn, HeldSignals(self._on_signal, only_default=True):
            self._is_running = True
            try:
                self._run(max_step)
            except BaseException as error:
                # Whether the peers continue without this one is for the launcher to decide.
                self._note_failure(error)
                if self._node is not None:
                    self._node.on_failure(error)
                raise
            finally:
                self._is_running = False

    def stop(
        self, reason: str, *, ok: bool = True, only_local: bool = False, final: bool = True
    ) -> None:
        """End the run when the current step is done, its way back included.

        A :meth:`wait_for` in this step ends at once. With a router, the tasks of all peers are
        stopped too.

        Args:
            reason: why, for the log and for :attr:`stop_reason`; the first reason stays.
            ok: False if the run has failed, also if it was stopped for another reason before.
            only_local: True if the peers continue without this task.
            final: whether the run is finished: when it is resumed from a snapshot, it runs no
                further step. False for an interruption, and for a limit that the caller also checks
                in its ``setup``, so that the run continues if the limit was raised.
        """
        self._request().make(reason, ok=ok, only_local=only_local, final=final)
        self._wake()

    def hold_stops(self) -> None:
        """Let this and all further stops wait until :meth:`decide_stop`.

        Processes that run the same steps together must also leave them together. One of them can
        be stopped at any time; it continues until all of them know, and have decided on the stop.
        """
        if self._held_stop is None:
            self._held_stop, self._stop = self._stop, StopRequest()

    @property
    def held_stop(self) -> dict[str, Any] | None:
        """The stop that waits for :meth:`decide_stop`, as plain values; None: none does."""
        stop = self._held_stop
        if stop is None or stop.reason is None or self.finish:
            return None
        origin = stop.origin if self._peers is None else self._peers.origin_of(stop)
        return {**dataclasses.asdict(stop), "origin": origin}

    def decide_stop(self, stop: Mapping[str, Any]) -> None:
        """Stop the task at the end of this step, as :attr:`held_stop` of one of the processes says.

        Args:
            stop: the same in all of them.
        """
        is_own = self.router is not None and stop["origin"] == self.router.node_id
        self._stop.make(**{**stop, "origin": None if is_own else stop["origin"]})
        self._wake()

    def at_stop(self, function: Callable[[], object]) -> None:
        """Call a function whenever the task is asked to stop, to wake up threads that wait.

        It must not wait, because a signal handler may call it.
        """
        self._at_stop.append(function)

    def at_step_end(self, function: Callable[[], object]) -> None:
        """Call a function once, between the current step and the next."""
        self._at_step_end.append(function)

    def at_close(self, function: Callable[[], object]) -> None:
        """Call a function when all middleware have been closed; the last one is called first."""
        self._at_close.append(function)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the context and of every middleware that has one.

        It is complete only between steps; within a step, use :meth:`at_step_end`. Values are not
        copied.
        """
        return {
            "context": self.ctx.state_dict(),
            "step_done": self._step_done,
            "finished": self._stop.text if self._stop.final else None,
            "middleware": self._lifecycle.state_dict(),
            "silent": self._lifecycle.silent(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned.

        The middleware are set up in between, when the context is restored. If the run was finished
        when its state was saved, :meth:`run` will run no further step. The state may come from a
        process with other roles of the same chain: middleware that were silent there begin from
        scratch.

        Raises:
            CheckpointMismatch: if the state was saved from another chain.
        """
        self._change("load_state_dict", keep_chain=True)
        before = self.ctx.state_dict()
        self.ctx.load_state_dict(state["context"])
        try:
            self._prepare()
            silent = state.get("silent", ())
            self._lifecycle.load_state_dict(state["middleware"], silent=silent)
        except BaseException:
            self.ctx.load_state_dict(before)
            raise
        self._step_done = state["step_done"]
        if state["finished"] is not None:
            _logger.warning(
                "the resumed run had already finished: %s; it runs no further step",
                state["finished"],
            )
            self.stop(state["finished"])

    def close(self) -> None:
        """Close the middleware in reverse order, then the event bus; may be called twice.

        Raises:
            BaseException: their errors, when all of them are closed.
        """
        errors = self._close_all()
        if errors:
            raise merge_errors(errors[0], errors[1:], what="closing the task")

    def _run(self, max_step: int | None) -> None:
        chain = self._prepare()
        if self._peers is not None:
            self._meet(self._peers)
        if self._node is not None:
            self._node.has_begun = True
        n_steps = 0
        while self._stop.reason is None and n_steps != max_step:
            if self._step_done:
                self.renew()
            self._run_step(chain)
            n_steps += 1
        if self._stop.reason is not None:
            if n_steps:
                # A signal may have stopped the task since the step ended.
                self._end_step()
            self._run_last_steps()
            self._stop_peers()
        self.sync()

    def _meet(self, peers: Peers) -> None:
        """Wait until the peers are ready, and check that all together have each part of the chain.

        Raises:
            ChainError: if a part has no process, and none can join.
        """
        peers.announce_roles(self._roles)
        later = peers.wait_until_ready(stopped=lambda: self._request().reason is not None)
        if later:
            self._stop.make(f"the peers have gone on to task {later}", only_local=True, final=False)
            self._wake()
        if self._stop.reason is None:
            peers.check_roles(self._whole_plan(), self._roles, lead=self.ctx.vocabulary.lead_role)

    def _note_failure(self, error: BaseException | None) -> None:
        self._stop.ok = False
        if error is not None and not self._failure:
            # Of a list, the first item too.
            text = " ".join(str(error).split("\n", 2)[:2])
            self._failure = f"{type(error).__name__}: {text}"[:300]

    def _announce_end(self) -> None:
        if self._peers is not None:
            how = self._failure or ("" if self._stop.ok else "it was stopped as failed")
            # After a stop, the peers know the reason already.
            is_over = self._stop.reason is None and not how and self.rank == 0
            self._peers.announce_end(self._roles, how, is_over=is_over)

    def _on_signal(self, reason: str) -> None:
        self.stop(reason, final=False)
        _logger.warning("%s: stopping after this step; send it again to stop now", reason)

    def _stop_peers(self) -> None:
        if self._peers is not None and self.ends_run:
            self._peers.stop(self._stop)

    def _accept_stop(self, stop: StopRequest) -> None:
        """Stop because another node has decided so, unless this task is stopping already."""
        request = self._request()
        if request.reason is None:
            request.make(**dataclasses.asdict(stop))
            self._wake()

    def _request(self) -> StopRequest:
        """Return what a stop changes: the request that waits, if stops are held."""
        return self._held_stop if self._held_stop is not None and not self.finish else self._stop

    def _wake(self) -> None:
        for function in self._at_stop:
            function()

    def _entry(
        self, mw: Any, *, roles: Iterable[str] | None = None, lock: bool | Lock | None = None
    ) -> Entry:
        entry = make_entry(
            mw.entry if isinstance(mw, Wrapped) else mw,
            roles=roles,
            lock=self._lock if lock is True else lock or None,
        )
        if self._has_default_context:
            kind = Declarations.of(entry.middleware).default_context
            if kind is not None:
                plain, self.ctx = self.ctx, cast(C, kind())
                self.ctx.__dict__.update(plain.__dict__)
                self.ctx.__dict__.pop("_parts", None)
                self._has_default_context = False
        return entry

    def _group(self, mws: Iterable[Any], *, parallel: bool) -> Group:
        self._refuse_closed("parallel" if parallel else "serial")
        entries = [self._entry(mw) for mw in mws]
        return Group(entries, parallel=parallel, compile_group=self._compile_group)

    def _compile_group(self, group: Group) -> Callable[[Any], object]:
        entry = Entry(group)
        self._set_up_new(entry)
        return self._compile((entry,), by_hand=True).middleware

    def _wrap(self, entry: Entry) -> Wrapped[C]:
        chain: Chain | None = None
        if self._is_set_up:
            self._set_up_new(entry)
        else:
            self._register((entry,))

        def start(ctx: C) -> Layer:
            nonlocal chain
            if chain is None:
                self._set_up_new(entry)
                chain = self._compile((entry,), by_hand=True)
            layer = Layer(chain, ctx)
            if layer.is_open:
                self._remember(layer)
            return layer

        return Wrapped(entry, start)

    def _remember(self, layer: Layer) -> None:
        """Run the layer's way back at the end of the step, unless it runs before."""
        with self._layers_lock:
            while self._layers and not self._layers[-1].is_open:
                self._layers.pop()
            self._layers.append(layer)

    def _compile(self, entries: Sequence[Entry], *, by_hand: bool = False) -> Chain:
        return self._compiler().compile(self._plan(entries, by_hand=by_hand))

    def _compiler(self) -> Compiler:
        return Compiler(
            self._wrappers,
            lock_timeout_s=self._lock_timeout_s,
            on_branches=self._branches.add,
            on_failure=self.events.wake,
        )

    def _plan(self, entries: Sequence[Entry], *, by_hand: bool = False) -> tuple[PlanItem, ...]:
        if self._parts is None:
            self._parts = parts_of((*self._entries, *self._by_hand))
        place = Place(self._roles, self.rank, self._run_roles, self._parts)
        return make_plan(entries, place, by_hand=by_hand)

    @property
    def _run_roles(self) -> frozenset[str]:
        """The roles of all processes of the run, as far as they are known."""
        planned = None if self._node is None else self._node.run_roles
        return frozenset((*map(str, self._roles), *(planned or ())))

    def _whole_plan(self) -> tuple[PlanItem, ...]:
        """Return the plan of the chain, and of what its middleware call by hand."""
        return (*self._plan(self._entries), *self._plan(self._by_hand, by_hand=True))

    def _view(self, *called: Entry) -> ChainView:
        """Return the chain with further entries, which are called by hand."""
        plan = (*self._whole_plan(), *self._plan(called, by_hand=True))
        return ChainView(plan, context=self.ctx)

    def _set_up_new(self, entry: Entry) -> None:
        """Bind and set up what an entry that is called by hand brings."""
        self._register((entry,))
        if self._lifecycle.has_new:
            self._lifecycle.bind(self._view(entry).of, only_new=True)
            self._lifecycle.set_up(self._of)

    def _prepare(self) -> Chain:
        """Check the chain, bind its middleware, and compile and set up whatever is new."""
        if self._chain is None:
            self.check()
            self._register_all()
            chain = self._compile(self._entries)
            is_first, self._is_set_up = not self._is_set_up, True
            self._lifecycle.bind(self.chain.of)
            self._lifecycle.set_up(self._of)
            if is_first:
                self.ctx.begin_run(self.at_close)
            self._chain = chain
        return self._chain

    def _adopt(self, ctx: C) -> None:
        ctx.task = self
        for name, part in ctx.parts.items():
            part.task = self.part(name)

    def _of(self, part: str | None) -> Task[C]:
        return self if part is None else self.part(part)

    def _register_all(self) -> None:
        for wrapper in self._wrappers:
            self._lifecycle.add(middleware_name(wrapper), wrapper)
        self._register((*self._by_hand, *self._entries))

    def _register(self, entries: Sequence[Entry]) -> None:
        """Add the members of the entries to the lifecycle, in the order of their set-up."""
        for item in leaves(self._plan(entries)):
            subject = middleware_object(item.entry.middleware)
            is_method = subject is not item.entry.middleware
            name = middleware_name(subject) if is_method else item.name
            self._lifecycle.add(name, subject, part=item.part, active=item.active)

    def _run_last_steps(self) -> None:
        """Deliver the data that peers sent before the stop to the middleware that only observe."""
        n_left = self._lifecycle.pending_steps()
        if n_left == 0:
            return
        chain = self._compiler().compile(
            item for item in leaves(self._plan(self._entries)) if item.declares.last_step
        )
        self._in_last_step = True
        try:
            for _ in range(n_left):
                if self._step_done:
                    self.renew()
                self._run_step(chain)
        finally:
            self._in_last_step = False

    def _run_step(self, chain: Chain) -> None:
        try:
            chain.run(self.ctx)
            if self._layers:
                self.backward()
        except BaseException as error:
            leaving = merge_errors(self._unwind_layers(error), self.events.take_errors())
            leaving.add_note(f"in step {self.ctx.total_step} of the task {self.name!r}")
            if leaving is error:
                raise
            raise leaving from leaving.__cause__
        finally:
            self._step_done = True
        if self._at_step_end or self.events.has_errors:
            self._end_step()

    def _end_step(self) -> None:
        functions, self._at_step_end = self._at_step_end, []
        for function in functions:
            function()
        self._raise_event_errors()

    def _raise_event_errors(self) -> None:
        errors = self.events.take_errors()
        if errors:
            raise merge_errors(errors[0], errors[1:], what="an event handler")

    def _unwind_layers(self, error: BaseException) -> BaseException:
        while self._layers:
            error = self._layers.pop().unwind(error)
        return error

    def _close_all(self) -> list[BaseException]:
        if self._closed:
            return []
        if self._is_running:
            raise TaskStateError(
                "a task cannot be closed while it runs; call task.stop(reason), and close it when "
                "run() has returned"
            )
        self._register_all()
        self._closed = True
        closers = [layer.close for layer in reversed(self._layers)]
        errors = _call_all(closers)
        errors += self._lifecycle.close()
        errors += _call_all(reversed(self._at_close))
        if self._peers is not None and self._peers.were_stopped:
            errors += _call_all([self._stop_peers])
        errors += _call_all([self._announce_end])
        in_order = self._stop.ok and not (self._node is not None and self._node.interrupted)
        close_events = functools.partial(self.events.close, in_order=in_order)
        errors += _call_all([*(branches.close for branches in self._branches), close_events])
        return errors + self.events.take_errors()

    def _change(self, what: str, *, keep_chain: bool = False) -> None:
        self._refuse_closed(what)
        self._parts = None
        if self._is_running:
            raise TaskStateError(f"{what}() cannot be called while the task runs")
        if not keep_chain:
            self._chain = None

    def _refuse_closed(self, what: str) -> None:
        if self._closed:
            raise TaskStateError(f"{what}() cannot be called: the task {self.name!r} is closed")


class TaskOfPart(Task[C]):
    """A task as the middleware of a named part of its chain see it.

    It is the same task, with the context of the part. It has a role where the middleware of the
    part with this role run: in the processes for the part, such as ``cook:red``, or, without such,
    in those of the role.

    Args:
        whole: the task.
        name: the name of the part.

    Attributes:
        part_name: the name of the part.
    """

    __slots__ = ("_task", "part_name")

    def __init__(self, whole: Task[C], name: str) -> None:
        self.__dict__ = whole.__dict__
        self._task = whole
        self.part_name = name

    @property
    def whole(self) -> Task[C]:
        """The task of the whole chain."""
        return self._task

    @property
    def ctx(self) -> C:
        """The context of the part."""
        context: C = self._task.ctx.part(self.part_name)
        return context

    @ctx.setter
    def ctx(self, context: C) -> None:
        raise TaskStateError("the context of a part belongs to that of the whole task")

    @property
    def chain(self) -> ChainView:
        """The chain as the middleware of the part see it."""
        return super().chain.of(self.part_name)

    def part(self, name: str) -> TaskOfPart[C]:
        """Return the task as the middleware of another part see it."""
        return self._task.part(name)

    def has_role(self, role: str) -> bool:
        """Return whether the middleware of the part with the role run in this process."""
        return not self._roles or not self._roles.isdisjoint(self.roles_for(role))

    def participants(self, *roles: str) -> list[int]:
        """Return the connected peers in which the middleware of the part with the roles run."""
        return self._task.participants(*self.roles_for(*roles))

    def later_tasks(self, *roles: str) -> dict[int, int]:
        """Return those of them that have gone on to a later task, and to which."""
        return self._task.later_tasks(*self.roles_for(*roles))

    def roles_for(self, *roles: str) -> tuple[str, ...]:
        """Return the roles of the processes in which middleware of the part with them run."""
        return roles_of_part(roles, self.part_name, self._task._run_roles)


def _call_all(functions: Iterable[Callable[[], object]]) -> list[BaseException]:
    errors: list[BaseException] = []
    for function in functions:
        try:
            function()
        except BaseException as error:  # noqa: BLE001 (raised when all were called)
            errors.append(error)
    return errors
