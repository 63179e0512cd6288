"""Groups of middleware, and the plan: what stands where in a chain, and whether it is active."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from dmiddleware.errors import WaitTimeout
from dmiddleware.pipeline.branches import Branches
from dmiddleware.pipeline.context import Context
from dmiddleware.pipeline.middleware import (
    check_middleware,
    middleware_location,
    middleware_name,
    string_tuple,
)
from dmiddleware.pipeline.onion import Chain, Step, around

__all__ = ["Lock", "Entry", "Group", "Node", "make_entry", "make_plan", "leaves", "Compiler"]


class Lock(Protocol):
    """A lock of ``threading`` or ``multiprocessing``."""

    def acquire(self, *, timeout: float) -> bool:
        """Take the lock, or return False after so many seconds."""
        ...

    def release(self) -> None:
        """Give the lock back."""
        ...


@dataclass(frozen=True, slots=True)
class Entry:
    """One use of a middleware.

    Attributes:
        middleware: what is used.
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
        parallel: whether each member runs on a thread of its own.
        compile_group: makes a middleware of the group, for calling it by hand.
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
        """Run the members, as one middleware."""
        if self._compiled is None:
            self._compiled = self._compile(self)
        return self._compiled(ctx)  # type: ignore[return-value]

    def __repr__(self) -> str:
        names = ", ".join(middleware_name(entry.middleware) for entry in self.entries)
        return f"{self.__name__}({names})"


@dataclass(frozen=True, slots=True)
class Node:
    """A middleware at its place in a chain.

    Attributes:
        entry: its use.
        path: its number in the chain, from 1, with the numbers within groups: ``"3.1"``.
        active: whether it runs in the task's roles.
        children: the members, if it is a group.
    """

    entry: Entry
    path: str
    active: bool
    children: tuple[Node, ...] = ()

    @property
    def name(self) -> str:
        """The middleware's name."""
        return middleware_name(self.entry.middleware)

    @property
    def label(self) -> str:
        """How messages name it."""
        return f"middleware {self.path} ({self.name})"

    @property
    def location(self) -> str:
        """Where it is defined, as ``file:line``, or an empty string."""
        return "" if self.is_group else middleware_location(self.entry.middleware)

    @property
    def is_group(self) -> bool:
        """Whether it is a serial or a parallel."""
        return isinstance(self.entry.middleware, Group)

    @property
    def is_parallel(self) -> bool:
        """Whether it is a parallel."""
        return isinstance(self.entry.middleware, Group) and self.entry.middleware.parallel

    @property
    def reads(self) -> tuple[str, ...]:
        """The fields that it declares to read."""
        return string_tuple(getattr(self.entry.middleware, "reads", ()))

    @property
    def writes(self) -> tuple[str, ...]:
        """The fields that it declares to write."""
        return string_tuple(getattr(self.entry.middleware, "writes", ()))

    @property
    def receives(self) -> tuple[str, ...]:
        """The fields that it declares to set when there are other processes."""
        return string_tuple(getattr(self.entry.middleware, "receives", ()))


def make_entry(mw: Any, *, roles: Iterable[str] | None = None, lock: Lock | None = None) -> Entry:
    """Check a middleware and make an entry of it.

    Args:
        mw: the middleware; one that ``task.wrap`` made stands for what it wraps.
        roles: replaces the roles that it declares.
        lock: held while its code runs.

    Raises:
        MiddlewareError: if it cannot be a middleware.
    """
    wrapped = getattr(mw, "entry", None)
    if isinstance(wrapped, Entry):
        given = wrapped.roles if roles is None else string_tuple(roles)
        return Entry(wrapped.middleware, given, lock if lock is not None else wrapped.lock)
    check_middleware(mw)
    declared = getattr(mw, "roles", ()) if roles is None else roles
    return Entry(mw, string_tuple(declared), lock)


def make_plan(entries: Sequence[Entry], roles: frozenset[str]) -> tuple[Node, ...]:
    """Number the entries, and tell which are active.

    Args:
        entries: the chain.
        roles: the task's; none means that everything is active.
    """
    return tuple(
        _make_node(entry, str(number), roles, within_active=True)
        for number, entry in enumerate(entries, start=1)
    )


def leaves(nodes: Iterable[Node]) -> Iterator[Node]:
    """Yield the nodes that are no groups, in order."""
    for node in nodes:
        if node.is_group:
            yield from leaves(node.children)
        else:
            yield node


class Compiler:
    """Makes steps of nodes.

    Args:
        wrappers: applied to every middleware, the first innermost.
        lock_timeout_s: the most seconds that a middleware waits for its lock.
    """

    def __init__(
        self, wrappers: Sequence[Callable[[Any], Any]] = (), *, lock_timeout_s: float
    ) -> None:
        self._wrappers = tuple(wrappers)
        self._lock_timeout_s = lock_timeout_s
        self._branches: list[Branches] = []

    def compile(self, nodes: Iterable[Node]) -> Chain:
        """Return the chain of the active nodes."""
        return Chain(self._steps(nodes))

    def close(self) -> None:
        """End the threads of what was compiled."""
        for branches in self._branches:
            branches.close()
        self._branches.clear()

    def _steps(self, nodes: Iterable[Node]) -> Iterator[Step]:
        for node in nodes:
            if not node.active:
                continue
            if node.is_group and not node.is_parallel and node.entry.lock is None:
                # Its members' way back is a part of the chain's own.
                yield from self._steps(node.children)
            else:
                yield Step(self._locked(node, self._call(node)), node.label)

    def _call(self, node: Node) -> Callable[[Any], object]:
        if node.is_parallel:
            chains = [Chain(self._steps((child,))) for child in node.children]
            branches = Branches([chain for chain in chains if chain.steps], node.label)
            self._branches.append(branches)
            return branches.middleware
        if node.is_group:
            return Chain(self._steps(node.children)).middleware
        call = node.entry.middleware
        for wrapper in self._wrappers:
            call = wrapper(call)
        return call  # type: ignore[no-any-return]

    def _locked(self, node: Node, call: Callable[[Any], object]) -> Callable[[Any], object]:
        lock, timeout_s = node.entry.lock, self._lock_timeout_s
        if lock is None:
            return call

        @contextmanager
        def hold(ctx: object, direction: str) -> Iterator[None]:
            if not lock.acquire(timeout=timeout_s):
                raise WaitTimeout(
                    f"{node.label} waited {timeout_s:g} s for its lock, which another middleware "
                    "holds; allow more with Task(lock_timeout_s=...) or let them not share it"
                )
            try:
                yield
            finally:
                lock.release()

        return around(call, hold)


def _make_node(entry: Entry, path: str, roles: frozenset[str], *, within_active: bool) -> Node:
    active = within_active and (not roles or not entry.roles or not roles.isdisjoint(entry.roles))
    members = entry.middleware.entries if isinstance(entry.middleware, Group) else ()
    children = tuple(
        _make_node(member, f"{path}.{number}", roles, within_active=active)
        for number, member in enumerate(members, start=1)
    )
    return Node(entry, path, active, children)
