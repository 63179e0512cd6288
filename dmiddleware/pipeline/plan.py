"""The plan of a chain: its entries and groups, which of them are active, and its compiled form."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from dmiddleware.errors import WaitTimeout
from dmiddleware.pipeline.branches import Branches
from dmiddleware.pipeline.context import Context
from dmiddleware.pipeline.middleware import (
    Declarations,
    check_middleware,
    middleware_location,
    middleware_name,
    string_tuple,
)
from dmiddleware.pipeline.onion import Chain, CompiledMiddleware, around

__all__ = [
    "Lock",
    "Entry",
    "Group",
    "Place",
    "PlanItem",
    "make_entry",
    "make_plan",
    "leaves",
    "parts_of",
    "qualified",
    "roles_of_part",
    "Compiler",
]


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
        part: the named part of the chain that it belongs to; None: the whole chain.
        roles: the roles in whose processes it runs; none means all.
        active: whether it runs in the task's roles and rank.
        declares: what it declares about itself.
        children: the members, if it is a group.
    """

    entry: Entry
    path: str
    part: str | None
    roles: tuple[str, ...]
    active: bool
    declares: Declarations
    children: tuple[PlanItem, ...] = ()

    @property
    def name(self) -> str:
        """The middleware's name, followed by that of its part: ``Cook:red``."""
        name = middleware_name(self.entry.middleware)
        return name if self.part is None else f"{name}:{self.part}"

    @property
    def reads(self) -> tuple[str, ...]:
        """The fields that it declares to read; ``red/obs`` is a field of the part ``red``."""
        return tuple(qualified(name, self.part) for name in self.declares.reads)

    @property
    def writes(self) -> tuple[str, ...]:
        """The fields that it declares to write, likewise."""
        return tuple(qualified(name, self.part) for name in self.declares.writes)

    @property
    def receives(self) -> tuple[str, ...]:
        """The further fields that it writes if there are other processes, likewise."""
        return tuple(qualified(name, self.part) for name in self.declares.receives)

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
        mw: the middleware, or an earlier entry for it.
        roles: overrides the roles that it declares.
        lock: held while its code runs.

    Raises:
        MiddlewareError: if it cannot be a middleware.
    """
    if isinstance(mw, Entry):
        entry = mw
    else:
        check_middleware(mw)
        entry = Entry(mw, string_tuple(Declarations.of(mw).roles))
    return Entry(
        entry.middleware,
        entry.roles if roles is None else string_tuple(roles),
        entry.lock if lock is None else lock,
    )


@dataclass(frozen=True, slots=True)
class Place:
    """Where a chain runs, which decides what of it is active.

    Attributes:
        roles: the task's; none means that everything is active.
        rank: the task's; middleware that declare ``lead_only`` are active on rank 0 only.
        run_roles: the roles of all processes, as far as they are known.
        parts: the named parts of the chain.
    """

    roles: frozenset[str]
    rank: int = 0
    run_roles: Collection[str] = ()
    parts: Collection[str] = ()


def make_plan(
    entries: Sequence[Entry], place: Place, *, by_hand: bool = False
) -> tuple[PlanItem, ...]:
    """Number the entries, and find out which are active.

    Args:
        entries: the chain.
        place: where it runs.
        by_hand: whether they are called by hand, and so have no numbers in the chain.
    """
    return tuple(
        _make_item(entry, "" if by_hand else str(number), place, within_active=True)
        for number, entry in enumerate(entries, start=1)
    )


def parts_of(entries: Iterable[Entry]) -> tuple[str, ...]:
    """Return the names of the parts to which the middleware of a chain belong, in order."""
    names: dict[str, None] = {}
    for entry in entries:
        if isinstance(entry.middleware, Group):
            names.update(dict.fromkeys(parts_of(entry.middleware.entries)))
        elif (name := Declarations.of(entry.middleware).part_name) is not None:
            names[name] = None
    return tuple(names)


def qualified(field: str, part: str | None) -> str:
    """Return the name of a field of a part's context in the whole chain, such as ``red/obs``."""
    return field if part is None or "/" in field else f"{part}/{field}"


def roles_of_part(
    roles: Iterable[str], part: str | None, run_roles: Collection[str]
) -> tuple[str, ...]:
    """Return the roles in whose processes a middleware runs.

    That of a part ``red`` runs in the processes for it, ``cook:red``, if the run has such, and
    otherwise in all with its role, ``cook``.

    Args:
        roles: those that it declares.
        part: the part that it belongs to; None: the whole chain.
        run_roles: the roles of all processes, as far as they are known.
    """
    if part is None:
        return tuple(roles)
    names: dict[str, None] = {}
    for role in roles:
        of_part = f"{role}:{part}"
        if of_part not in run_roles:
            names[role] = None
        names[of_part] = None
    return tuple(names)


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
        return call if item.part is None else _in_part(call, item.part)

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


def _in_part(call: Callable[[Any], object], part: str) -> Callable[[Any], object]:
    """Return a middleware that runs another one on the context of a part."""

    @contextmanager
    def sum_up(ctx: Context, direction: str) -> Iterator[None]:
        try:
            yield
        finally:
            ctx.sum_up()

    summing = around(call, sum_up)
    return lambda ctx: summing(ctx.part(part))


def _make_item(entry: Entry, path: str, place: Place, *, within_active: bool) -> PlanItem:
    declares = Declarations.of(entry.middleware)
    part = declares.part_name
    if part is None and declares.joins_part in place.parts:
        part = declares.joins_part
    roles = roles_of_part(entry.roles, part, place.run_roles)
    if part is None and declares.with_parts:
        roles = (*roles, *(f"{role}:{name}" for role in entry.roles for name in place.parts))
    active = within_active and (not place.roles or not roles or not place.roles.isdisjoint(roles))
    active = active and (place.rank == 0 or not declares.lead_only)
    members = entry.middleware.entries if isinstance(entry.middleware, Group) else ()
    children = tuple(
        _make_item(member, f"{path}.{number}".lstrip("."), place, within_active=active)
        for number, member in enumerate(members, start=1)
    )
    return PlanItem(entry, path, part, roles, active, declares, children)
