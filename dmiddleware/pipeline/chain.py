"""Chains: groups, the plan of what is active, parallel branches, and middleware called by hand."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, Generic, Protocol, TypeVar

from dmiddleware.errors import WaitTimeout
from dmiddleware.pipeline.context import Context
from dmiddleware.pipeline.middleware import (
    Declarations,
    check_middleware,
    middleware_location,
    middleware_name,
    string_tuple,
)
from dmiddleware.pipeline.onion import (
    Chain,
    CompiledMiddleware,
    Frames,
    OnError,
    around,
    backward,
    forward,
    merge_errors,
    throw_all,
    unwind,
)

__all__ = [
    "Lock",
    "Entry",
    "Group",
    "PlanItem",
    "make_entry",
    "make_plan",
    "leaves",
    "Compiler",
    "Branches",
    "branch_failure",
    "Layer",
    "Wrapped",
]

C = TypeVar("C", bound=Context)

_logger = logging.getLogger(__name__)


class Lock(Protocol):
    """A lock of ``threading`` or ``multiprocessing``."""

    def acquire(self, *, timeout: float) -> bool:
        """Acquire the lock, or return False after the timeout."""
        ...

    def release(self) -> None:
        """Release the lock."""
        ...


@dataclass(frozen=True, slots=True)
class Entry:
    """One use of a middleware.

    Attributes:
        middleware: the middleware.
        roles: the roles in which it is active; none means all.
        lock: held while its code runs, in either direction.
    """

    middleware: Any
    roles: tuple[str, ...] = ()
    lock: Lock | None = None


class Group:
    """Several middleware that are used as one; made by ``task.serial`` and ``task.parallel``.

    Args:
        entries: the members.
        parallel: whether each member runs on its own thread.
        compile_group: compiles the group into a middleware, to call it by hand.
    """

    def __init__(
        self,
        entries: Iterable[Entry],
        *,
        parallel: bool,
        compile_group: Callable[[Group], Callable[[Any], object]],
    ) -> None:
        self.entries = tuple(entries)
        self.parallel = parallel
        self.__name__ = "parallel" if parallel else "serial"
        self._compile = compile_group
        self._compiled: Callable[[Any], object] | None = None

    def __call__(self, ctx: Context) -> Generator[None, None, None] | None:
        """Run the members as one middleware."""
        if self._compiled is None:
            self._compiled = self._compile(self)
        return self._compiled(ctx)  # type: ignore[return-value]

    def __repr__(self) -> str:
        names = ", ".join(middleware_name(entry.middleware) for entry in self.entries)
        return f"{self.__name__}({names})"


@dataclass(frozen=True, slots=True)
class PlanItem:
    """A middleware at its position in a chain.

    Attributes:
        entry: the entry that uses it.
        path: its number in the chain, from 1, with the numbers within groups (``"3.1"``); empty if
            it is called by hand.
        active: whether it runs in the task's roles and rank.
        declares: what it declares about itself.
        children: the members, if it is a group.
    """

    entry: Entry
    path: str
    active: bool
    declares: Declarations
    children: tuple[PlanItem, ...] = ()

    @property
    def name(self) -> str:
        """The middleware's name."""
        return middleware_name(self.entry.middleware)

    @property
    def label(self) -> str:
        """Its name in messages."""
        return f"middleware {self.path} ({self.name})" if self.path else f"middleware {self.name}"

    @property
    def location(self) -> str:
        """Where it is defined, as ``file:line``, or an empty string."""
        return "" if self.is_group else middleware_location(self.entry.middleware)

    @property
    def is_group(self) -> bool:
        """Whether it is a group, serial or parallel."""
        return isinstance(self.entry.middleware, Group)

    @property
    def is_parallel(self) -> bool:
        """Whether it is a parallel group."""
        return isinstance(self.entry.middleware, Group) and self.entry.middleware.parallel


def make_entry(
    mw: object, *, roles: Iterable[str] | None = None, lock: Lock | None = None
) -> Entry:
    """Check a middleware and return an entry for it.

    Args:
        mw: the middleware; what ``task.wrap`` returned stands for the middleware that it wraps.
        roles: overrides the roles that it declares.
        lock: held while its code runs.

    Raises:
        MiddlewareError: if it cannot be a middleware.
    """
    if isinstance(mw, Wrapped):
        wrapped = mw.entry
        given = wrapped.roles if roles is None else string_tuple(roles)
        return Entry(wrapped.middleware, given, lock if lock is not None else wrapped.lock)
    check_middleware(mw)
    return Entry(mw, string_tuple(Declarations.of(mw).roles if roles is None else roles), lock)


def make_plan(
    entries: Sequence[Entry], roles: frozenset[str], *, rank: int = 0, by_hand: bool = False
) -> tuple[PlanItem, ...]:
    """Number the entries, and find out which are active.

    Args:
        entries: the chain.
        roles: the task's; none means that everything is active.
        rank: the task's; middleware that declare ``lead_only`` are active on rank 0 only.
        by_hand: whether they are called by hand, and so have no numbers in the chain.
    """
    return tuple(
        _make_item(entry, "" if by_hand else str(number), roles, rank, within_active=True)
        for number, entry in enumerate(entries, start=1)
    )


def leaves(items: Iterable[PlanItem]) -> Iterator[PlanItem]:
    """Yield the items that are not groups, in order."""
    for item in items:
        if item.is_group:
            yield from leaves(item.children)
        else:
            yield item


class Compiler:
    """Turns items of a plan into chains.

    Args:
        wrappers: applied to every middleware, the first innermost.
        lock_timeout_s: the most seconds that a middleware waits for its lock.
        on_branches: called with the :class:`Branches` of each parallel, which must be closed.
        on_failure: called when a branch of a parallel fails.
    """

    def __init__(
        self,
        wrappers: Sequence[Callable[[Any], Any]] = (),
        *,
        lock_timeout_s: float,
        on_branches: Callable[[Branches], object],
        on_failure: Callable[[], object],
    ) -> None:
        self._wrappers = tuple(wrappers)
        self._lock_timeout_s = lock_timeout_s
        self._on_branches = on_branches
        self._on_failure = on_failure

    def compile(self, items: Iterable[PlanItem]) -> Chain:
        """Return the chain of the active items."""
        return Chain(self._members(items))

    def _members(self, items: Iterable[PlanItem]) -> Iterator[CompiledMiddleware]:
        for item in items:
            if not item.active:
                continue
            if item.is_group and not item.is_parallel and item.entry.lock is None:
                # Its members run their way back as part of the chain's.
                yield from self._members(item.children)
            else:
                yield CompiledMiddleware(self._locked(item, self._call(item)), item.label)

    def _call(self, item: PlanItem) -> Callable[[Any], object]:
        if item.is_parallel:
            chains = [Chain(self._members((child,))) for child in item.children]
            branches = Branches(
                [chain for chain in chains if chain.members],
                item.label,
                on_failure=self._on_failure,
            )
            self._on_branches(branches)
            return branches.middleware
        if item.is_group:
            return Chain(self._members(item.children)).middleware
        call = item.entry.middleware
        for wrapper in self._wrappers:
            call = wrapper(call)
        return call  # type: ignore[no-any-return]

    def _locked(self, item: PlanItem, call: Callable[[Any], object]) -> Callable[[Any], object]:
        lock, timeout_s = item.entry.lock, self._lock_timeout_s
        if lock is None:
            return call

        @contextmanager
        def hold(ctx: object, direction: str) -> Iterator[None]:
            if not lock.acquire(timeout=timeout_s):
                raise WaitTimeout(
                    f"{item.label} waited {timeout_s:g} s for its lock, which another middleware "
                    "holds; raise Task(lock_timeout_s=...) or use different locks"
                )
            try:
                yield
            finally:
                lock.release()

        return around(call, hold)


class _Pass:
    """One pass through parallel branches: the first failure among them, and the pass around it."""

    __slots__ = ("_failure", "_outer")

    def __init__(self, outer: _Pass | None) -> None:
        self._failure: BaseException | None = None
        self._outer = outer

    @property
    def failure(self) -> BaseException | None:
        """The first error of a branch, in this pass or in one around it."""
        if self._failure is None and self._outer is not None:
            return self._outer.failure
        return self._failure

    def fail(self, error: BaseException) -> None:
        if self._failure is None:
            self._failure = error


_current_pass: ContextVar[_Pass | None] = ContextVar("dmiddleware.parallel_pass", default=None)


def branch_failure() -> Callable[[], BaseException | None]:
    """Return a function that returns the error of a branch beside the caller's, or None."""
    current = _current_pass.get()
    return lambda: None if current is None else current.failure


class Branches:
    """Runs chains in parallel on the same context.

    A branch has its own thread for all its steps, in both directions, so its middleware may depend
    on the thread (a renderer's context, for example). All branches are joined before the
    step continues, and again on the way back, which they also run in parallel.

    When branches fail, the others finish the direction they are in, and their ``task.wait_for``
    ends at once. A failed branch is unwound with its own error, then the suspended middleware of
    the others with the ``ExceptionGroup`` of all errors, branch after branch in reverse order, each
    on its own thread.

    Args:
        chains: the branches.
        label: the name of the parallel in messages.
        on_failure: called when a branch fails, on its thread.
        report_s: the interval in seconds at which the log names the branches still running.
    """

    def __init__(
        self,
        chains: Iterable[Chain],
        label: str,
        *,
        on_failure: Callable[[], object] = lambda: None,
        report_s: float = 60.0,
    ) -> None:
        self._chains = tuple(chains)
        self._label = label
        self._on_failure = on_failure
        self._report_s = report_s
        self._threads: tuple[ThreadPoolExecutor, ...] = ()
        self._abandoned = False

    def middleware(self, ctx: Context) -> Generator[None, None, None]:
        """Run as one middleware of an outer chain."""
        if not self._threads:
            self._threads = tuple(
                ThreadPoolExecutor(1, thread_name_prefix=f"{self._label} branch {number}")
                for number in range(1, len(self._chains) + 1)
            )
        frames: list[Frames] = [[] for _ in self._chains]
        this_pass = _Pass(_current_pass.get())
        with OnError(partial(self._unwind_all, frames)):
            self._run_all(
                this_pass,
                frames,
                [
                    partial(forward, chain.members, ctx, mine)
                    for chain, mine in zip(self._chains, frames, strict=True)
                ],
            )
            if any(frames):
                yield
            self._run_all(this_pass, frames, [partial(backward, mine) for mine in frames])

    def close(self) -> None:
        """End the threads, which are idle between steps; may be called twice."""
        for thread in self._threads:
            thread.shutdown(wait=not self._abandoned)
        self._threads = ()

    def _run_all(
        self,
        this_pass: _Pass,
        frames: Sequence[Frames],
        halves: Sequence[Callable[[], object]],
    ) -> None:
        futures = [
            thread.submit(self._run_half, this_pass, mine, half)
            for thread, mine, half in zip(self._threads, frames, halves, strict=True)
        ]
        interrupt = self._join(this_pass, futures)
        if interrupt is not None and self._abandoned:
            raise interrupt
        errors = [error for future in futures if (error := future.result()) is not None]
        if interrupt is not None:
            raise merge_errors(interrupt, errors)
        if not errors:
            return
        if all(isinstance(error, Exception) for error in errors):
            raise ExceptionGroup(
                f"{len(errors)} of {len(futures)} branches of {self._label} failed",
                [error for error in errors if isinstance(error, Exception)],
            )
        raise merge_errors(errors[0], errors[1:])

    def _run_half(
        self, this_pass: _Pass, frames: Frames, half: Callable[[], object]
    ) -> BaseException | None:
        _current_pass.set(this_pass)
        try:
            half()
        except BaseException as error:  # noqa: BLE001 (raised by the thread that runs the step)
            this_pass.fail(error)
            self._on_failure()
            _current_pass.set(None)  # cleaning up may wait
            return unwind(frames, error)
        finally:
            _current_pass.set(None)
        return None

    def _join(
        self, this_pass: _Pass, futures: Sequence[Future[BaseException | None]]
    ) -> KeyboardInterrupt | None:
        """Wait for all branches; return a first interrupt at the end, and a second one at once."""
        interrupt: KeyboardInterrupt | None = None
        pending = set(futures)
        while pending:
            try:
                _, pending = wait(pending, timeout=self._report_s)
                if pending:
                    _logger.warning(
                        "%s is still waiting for its branches %s",
                        self._label,
                        _unfinished_branches(futures),
                    )
            except KeyboardInterrupt as raised:
                if interrupt is not None:
                    self._abandoned = True
                    return interrupt
                interrupt = raised
                this_pass.fail(raised)
                self._on_failure()
                _logger.warning(
                    "%s was interrupted and is waiting for its branches %s to finish. "
                    "Interrupt it again to leave them running.",
                    self._label,
                    _unfinished_branches(futures),
                )
        return interrupt

    def _unwind_all(self, frames: Sequence[Frames], error: BaseException) -> BaseException:
        if self._abandoned:
            return error
        further: list[BaseException] = []
        for thread, mine in reversed(list(zip(self._threads, frames, strict=True))):
            if mine:
                error = thread.submit(throw_all, mine, error, further).result()
        return merge_errors(error, further)


def _unfinished_branches(futures: Sequence[Future[BaseException | None]]) -> str:
    return ", ".join(str(n) for n, future in enumerate(futures, 1) if not future.done())


class Layer:
    """A middleware called by hand, whose way forward has run and whose way back has not.

    Run the way back with :meth:`back`, or use the layer in a ``with``, which also throws an error
    of its block into it. Otherwise the task runs the way back at the end of the step.

    Args:
        chain: the compiled middleware; its way forward runs now.
        ctx: the context.
    """

    def __init__(self, chain: Chain, ctx: Context) -> None:
        self._frames: Frames = []
        with OnError(partial(unwind, self._frames)):
            forward(chain.members, ctx, self._frames)

    @property
    def is_open(self) -> bool:
        """Whether its way back has not run yet."""
        return bool(self._frames)

    def back(self) -> None:
        """Run the way back; may be called twice."""
        with OnError(partial(unwind, self._frames)):
            backward(self._frames)

    def unwind(self, error: BaseException) -> BaseException:
        """Throw an error into the suspended middleware, and return the error to raise."""
        return unwind(self._frames, error)

    def close(self) -> None:
        """Run only the ``finally`` blocks of the suspended middleware; may be called twice.

        Raises:
            BaseException: their errors, when all of them have run.
        """
        errors: list[BaseException] = []
        while self._frames:
            member, generator = self._frames.pop()
            try:
                generator.close()
            except BaseException as error:  # noqa: BLE001 (raised below)
                error.add_note(f"in {member.label} while it was being closed")
                errors.append(error)
        if errors:
            raise merge_errors(errors[0], errors[1:], what="closing a layer")

    def __enter__(self) -> Layer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None:
            self.back()
        else:
            OnError(self.unwind).__exit__(kind, error, traceback)


class Wrapped(Generic[C]):
    """A middleware that can be called from within another; made by ``task.wrap``.

    In a chain, it is the same as the middleware itself, with its lock.

    Args:
        entry: the middleware.
        start: runs its way forward.
    """

    def __init__(self, entry: Entry, start: Callable[[C], Layer]) -> None:
        self.entry = entry
        self._start = start

    def __call__(self, ctx: C) -> Layer:
        """Run the way forward, and return the layer that runs the way back."""
        return self._start(ctx)


def _make_item(
    entry: Entry, path: str, roles: frozenset[str], rank: int, *, within_active: bool
) -> PlanItem:
    active = within_active and (not roles or not entry.roles or not roles.isdisjoint(entry.roles))
    declares = Declarations.of(entry.middleware)
    active = active and (rank == 0 or not declares.lead_only)
    members = entry.middleware.entries if isinstance(entry.middleware, Group) else ()
    children = tuple(
        _make_item(member, f"{path}.{number}".lstrip("."), roles, rank, within_active=active)
        for number, member in enumerate(members, start=1)
    )
    return PlanItem(entry, path, active, declares, children)
