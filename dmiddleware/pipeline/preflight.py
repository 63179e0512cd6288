"""The check before the first step: all problems of a chain at once, each with its remedy."""

from __future__ import annotations

import enum
import os
from collections.abc import Collection, Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from dmiddleware.errors import ChainError
from dmiddleware.pipeline.context import Context, FieldKind
from dmiddleware.pipeline.middleware import (
    Declarations,
    is_generator_middleware,
    middleware_object,
    misspelled_role,
)
from dmiddleware.pipeline.plan import PlanItem, leaves, qualified
from dmiddleware.process.import_guard import refuse_at_import
from dmiddleware.registry import nearest

__all__ = [
    "ChainCheck",
    "ChainView",
    "asks_for_roles",
    "chain_error",
    "idle_part",
    "parts_without_process",
    "undecided_roles",
]


class ChainView:
    """A chain as a middleware's ``bind(chain)`` and ``preflight(chain)`` see it.

    The middleware of a named part see those of their part, and those of no part see the others of
    no part, whatever parts there are beside them.

    Args:
        items: the plan of the chain, and of what middleware call by hand.
        context: the context of the first step.

    Attributes:
        context: the context of the first step, of the part.
        part: the name of the part; None: it is the whole chain, or those of no part.
        whole: the whole chain, with all parts.
    """

    def __init__(self, items: Iterable[PlanItem], *, context: Context) -> None:
        self._all = self._items = tuple(leaves(items))
        self.context = context
        self.part: str | None = None
        self.whole = self

    @property
    def parts(self) -> tuple[str, ...]:
        """The names of all parts of the whole chain, in order."""
        names = (item.part for item in self._all)
        return tuple(dict.fromkeys(name for name in names if name is not None))

    def of(self, part: str | None) -> ChainView:
        """Return the chain as the middleware of a part see it, or, for None, those of no part."""
        whole = self.whole
        context = whole.context if part is None else whole.context.part(part)
        view = ChainView(whole._all, context=context)
        view._items = tuple(item for item in whole._all if item.part == part)
        view.part, view.whole = part, whole
        return view

    @property
    def middleware(self) -> Sequence[object]:
        """The middleware of all roles, in order; for a bound method, the object it belongs to."""
        return tuple(middleware_object(item.entry.middleware) for item in self._items)

    @property
    def declarations(self) -> Sequence[Declarations]:
        """What each of them declares about itself, in the same order."""
        return tuple(item.declares for item in self._items)

    @property
    def active(self) -> Sequence[object]:
        """The middleware that run in this task's roles."""
        return tuple(middleware_object(i.entry.middleware) for i in self._items if i.active)

    def writes(self, name: str) -> bool:
        """Return whether any middleware, in any role, declares that it writes the field."""
        field = qualified(name, self.part)
        return any(field in item.writes for item in self._all)

    def fills(self, store: object) -> bool:
        """Return whether any middleware, in any role and part, declares that it fills the store."""
        return any(_is_in(store, item.declares.fills) for item in self._all)


@runtime_checkable
class _TakesPartInCheck(Protocol):
    def preflight(self, chain: ChainView) -> Iterable[str]: ...


def chain_error(problems: Collection[str]) -> ChainError:
    """Return an error that lists all problems."""
    listed = "".join(f"\n  {n}. {problem}" for n, problem in enumerate(problems, start=1))
    return ChainError(f"the chain cannot run; {len(problems)} problem(s):{listed}")


def parts_without_process(items: Iterable[PlanItem], run_roles: Collection[str]) -> list[PlanItem]:
    """Return the middleware that no process of a run executes, one for each set of roles.

    Args:
        items: the plan, groups included.
        run_roles: the roles of all processes.
    """
    idle: dict[frozenset[str], PlanItem] = {}
    for item in _every(items):
        roles = frozenset(map(str, item.roles))
        if roles and roles.isdisjoint(run_roles):
            idle.setdefault(roles, item)
    return list(idle.values())


def asks_for_roles(own: Collection[str], run_roles: Collection[str], *, lead: str | None) -> bool:
    """Return whether a process checks that each part of the chain has one.

    Args:
        own: the roles of the process.
        run_roles: the roles of all processes.
        lead: the role that checks this for all others, if a process of the run has it.
    """
    return lead in own or lead not in run_roles


def undecided_roles(
    items: Iterable[PlanItem],
    roles: Mapping[int, Collection[str]],
    *,
    lead: str | None,
) -> str:
    """Say what is wrong with the roles that the program has given to the processes of a run.

    Args:
        items: the plan, groups included.
        roles: the roles of each process, by node id.
        lead: the role that one process has, unless the launcher starts several that learn as one.

    Returns:
        The problem, with the remedy; empty: there is none.
    """
    parts = {str(role) for item in _every(items) for role in item.entry.roles}
    without = [node_id for node_id, names in roles.items() if not names]
    if parts and without:
        return (
            f"the program has given {_nodes(without)} none of the roles "
            f"{', '.join(sorted(parts))}, so the whole chain would run there, too; give a role to "
            "each of the processes with task.add_role(...), or name them, as in ditask --roles "
            + ",".join(f"{part}=1" for part in sorted(parts, key=lambda part: part != lead))
        )
    leads = [node_id for node_id, names in roles.items() if lead in names]
    if lead is None or len(leads) < 2:
        return ""
    return (
        f"the program has given the role {str(lead)!r} to {_nodes(leads)}, and each would learn "
        "for itself; give it to one of them, or start several that learn as one, as in ditask "
        f"--roles {lead}=2"
    )


def _nodes(node_ids: Collection[int]) -> str:
    return f"node{'s' * (len(node_ids) > 1)} {', '.join(map(str, sorted(node_ids)))}"


def idle_part(
    item: PlanItem,
    run_roles: Collection[str],
    *,
    lead: str | None,
    may_grow: bool = False,
    decides: bool = False,
) -> str:
    """Say that no process executes a part of the chain, with the remedy.

    Args:
        item: the part.
        run_roles: the roles of all processes.
        lead: the role to name first.
        may_grow: whether processes with further roles may join the run.
        decides: whether the program gives the processes their roles.
    """
    # The role that all parts of a kind share comes first.
    roles = sorted(map(str, item.roles), key=lambda role: (":" in role, role))
    part = (
        f"{item.label} is for the role {' or '.join(map(repr, roles))}, but no process of the run "
        f"has it (the run's roles: {', '.join(sorted(run_roles))})"
    )
    if may_grow:
        return (
            f"{part}; it does nothing until one joins, as with ditask --attach-to ADDRESS --roles "
            f"{roles[0]}=1"
        )
    if decides:
        return (
            f"{part}, so it would never run; give the role to one with task.add_role({roles[0]!r})"
            ", or remove the middleware"
        )
    return (
        f"{part}, so it would never run; start a process with it, as in --roles "
        f"{_launched(run_roles, roles[0], lead)}, or remove the middleware"
    )


def _launched(run_roles: Collection[str], role: str, lead: str | None) -> str:
    names = sorted(
        {*map(str, run_roles), str(role)}, key=lambda role_name: (role_name != lead, role_name)
    )
    return ",".join(f"{name}=1" for name in names)


@dataclass
class ChainCheck:
    """The check of a chain before its first step.

    Attributes:
        items: the plan.
        ctx: the context of the first step.
        roles: the task's.
        by_hand: the plan of the middleware that others call with ``task.wrap``, at unknown times.
        has_peers: whether there are other processes, from which fields may arrive.
        run_roles: the roles that the processes of the run have; None: unknown.
    """

    items: Sequence[PlanItem]
    ctx: Context
    roles: frozenset[str]
    by_hand: Sequence[PlanItem]
    has_peers: bool
    run_roles: Collection[str] | None

    def __post_init__(self) -> None:
        self._whole = (*self.items, *self.by_hand)
        self._view = ChainView(self._whole, context=self.ctx)
        self._kinds = self.ctx.field_kinds()
        self._words = self.ctx.vocabulary
        self._all = list(leaves(self._whole))
        self._active = [item for item in self._all if item.active]
        self._order = {id(item): index for index, item in enumerate(self._all)}
        self._problems: list[str] = []

    def run(self) -> None:
        """Refuse a chain that cannot run.

        Raises:
            ChainError: with all problems and the remedy of each.
            LaunchError: if a module runs the chain while it is imported by a node, or by a process
                of envs.
        """
        refuse_at_import("runs a task")
        if self.items:
            self._check_roles()
            self._check_locks(self.items, held=())
            by_hand = {name for item in leaves(self.by_hand) for name in item.writes}
            self._check_fields(self.items, by_hand)
            self._check_parts()
            self._check_owners()
            self._check_stores()
            self._ask_middleware()
        else:
            self._problems.append("it is empty; add middleware with task.use(...)")
        if self._problems:
            raise chain_error(self._problems)

    def _check_roles(self) -> None:
        parts = {role for item in _every(self._whole) for role in item.roles}
        unused = self.roles - parts
        if not parts or (self.run_roles is not None and unused != self.roles):
            # A chain without roles runs as a whole in every process. A launched process has two
            # roles where there are more roles than processes.
            unused = frozenset()
        for role in sorted(unused):
            self._problems.append(
                f"the task has the role {str(role)!r}, but the chain has middleware only for "
                f"{', '.join(sorted(parts))}; declare roles=({str(role)!r},) for the middleware "
                "of this role, or start no process with it, as in ditask --roles "
                + ",".join(f"{part}=1" for part in sorted(parts))
            )
        if self.run_roles is not None:
            self._check_run_roles({*map(str, self.run_roles), *map(str, self.roles)})
        role_names = {*self._words.roles, *map(str, self.roles)}
        for item in _every(self.items):
            for role in item.entry.roles:
                # A member of an Enum was defined somewhere: it is not a typo.
                near = None if isinstance(role, enum.Enum) else misspelled_role(role, role_names)
                if role not in role_names and near is not None:
                    self._problems.append(
                        f"{item.label} is for the role {role!r}, which is unknown; did you mean "
                        f"{near!r}? Define a custom role as a member of a StrEnum."
                    )

    def _check_run_roles(self, run_roles: set[str]) -> None:
        """Check that each part of the chain has a process.

        Peers can have been given further roles by the program, which only they know. The lead
        decides how the launcher connects the processes, so it must be in its plan.
        """
        lead = self._words.lead_role
        for item in parts_without_process(self._whole, run_roles):
            if lead is not None and lead in item.roles:
                self._problems.append(
                    f"{item.label} is for the {lead}, but the run has no {lead} (its roles: "
                    f"{', '.join(sorted(run_roles))}); start the run with a {lead}, as in "
                    f"--roles {_launched(run_roles, lead, lead)}"
                )
            elif not self.has_peers and asks_for_roles(self.roles, run_roles, lead=lead):
                self._problems.append(idle_part(item, run_roles, lead=lead))

    def _check_locks(self, items: Iterable[PlanItem], held: tuple[object, ...]) -> None:
        for item in items:
            lock = item.entry.lock
            if lock is not None and any(lock is held_lock for held_lock in held):
                self._problems.append(
                    f"{item.label} would wait forever for a lock that the parallel around it "
                    "holds; lock either the parallel or its members"
                )
            # Within one thread, the task's own lock may be taken again.
            inner = (*held, lock) if item.is_parallel and lock is not None else held
            self._check_locks(item.children, inner)

    def _check_fields(self, items: Iterable[PlanItem], written: set[str]) -> None:
        """Check the reads of the items, and add to ``written`` the fields that they write."""
        for item in items:
            if not item.active:
                continue
            if item.is_parallel:
                branches = [set(written) for _ in item.children]
                for child, branch in zip(item.children, branches, strict=True):
                    self._check_fields((child,), branch)
                written.update(*branches)
            elif item.is_group:
                self._check_fields(item.children, written)
            else:
                for name in item.reads:
                    if name not in written and not self._is_satisfied(item, name):
                        self._problems.append(self._unwritten(item, name))
                written.update(item.writes)
                if self.has_peers:
                    written.update(item.receives)

    def _is_satisfied(self, item: PlanItem, name: str) -> bool:
        ctx, field = self._field(name)
        if self._kinds.get(field) in (FieldKind.KEPT, FieldKind.RENEWED):
            return True
        is_kept = ctx.is_kept(field)
        if is_kept and ctx.has_value(field):
            return True
        # A field that a later middleware writes is there by the next step, or on the way back.
        arrives = is_kept or is_generator_middleware(item.entry.middleware)
        return arrives and any(name in part.writes for part in self._active)

    def _field(self, name: str) -> tuple[Context, str]:
        """Return the context of a field, that of a part for ``red/obs``, and its name in there."""
        part, slash, field = name.rpartition("/")
        return (self.ctx.part(part), field) if slash else (self.ctx, name)

    def _unwritten(self, item: PlanItem, name: str) -> str:
        start = f"{item.label} reads {_shown_field(name)}, which"
        others = [part for part in self._active if name in part.writes and part is not item]
        if others:
            return self._written_elsewhere(item, name, others, start)
        inactive = [part for part in self._all if name in part.writes and not part.active]
        if inactive:
            roles = ", ".join(sorted(map(str, self.roles)))
            return (
                f"{start} {inactive[0].label} writes, but that is inactive in the role {roles}; "
                f"add {self._words.exchange} before it, to exchange the field between the roles"
            )
        ctx, field = self._field(name)
        if remedy := self._remedy_in_parts(field, name):
            return f"{start} no middleware writes there; {remedy}"
        if ctx.has_value(field):
            return (
                f"{start} is set now, but is reset after the first step; carry it over: "
                f"ctx.keep({field!r})"
            )
        if field in self._kinds or ctx.is_kept(field):
            default = f"a middleware that declares writes=({field!r},)"
            writer = self._words.writers.get(field, default)
            name_it = f", with name={item.part!r}" if item.part is not None else ""
            return (
                f"{start} no middleware before it writes; add {writer}{name_it} before it"
                f"{self._undeclared_writer(item, name)}"
            )
        near = nearest(field, [kind for kind in self._kinds if kind != "task"])
        hint = f"did you mean {', '.join(near)}? " if near else ""
        return (
            f"{start} is not a field of {type(self.ctx).__name__} and which no middleware writes; "
            f"{hint}To add a custom field, declare it in a subclass of the context, or declare "
            f"writes=({field!r},) with @middleware on a middleware before this one."
        )

    def _remedy_in_parts(self, field: str, name: str) -> str:
        """Return the remedy if middleware of other parts write the field; empty: none do."""
        part = name.rpartition("/")[0] or None
        writers = [
            f"{writer.label} in {_shown_part(written.rpartition('/')[0] or None)}"
            for writer in self._all
            for written in writer.writes
            if written != name and written.rpartition("/")[2] == field
        ]
        if not writers:
            return ""
        name_of_part = "no name" if part is None else f"name={part!r}"
        return (
            f"it is written by {', '.join(writers)}, and each part has fields of its own: give "
            f"one of them {name_of_part}, or the reader the name of its writer"
        )

    def _undeclared_writer(self, item: PlanItem, name: str) -> str:
        """Return a further remedy: a middleware before it that may well write the field."""
        earlier = [part for part in self._active if self._order[id(part)] < self._order[id(item)]]
        for part in earlier:
            for written in part.writes:
                is_field = written.rpartition("/")[2] in self._kinds
                if not is_field and nearest(written, (name,)):
                    return f" ({part.label} writes {_shown_field(written)}: is that a typo?)"
        undeclared = [part for part in earlier if not _declares_fields(part.declares)]
        if not undeclared:
            return ""
        return (
            f", or, if {undeclared[0].label} writes it, declare that: decorate "
            f"{undeclared[0].name} with @middleware(writes=({name!r},))"
        )

    def _written_elsewhere(
        self, item: PlanItem, name: str, others: Sequence[PlanItem], start: str
    ) -> str:
        index = self._order[id(item)]
        earlier = [part for part in others if self._order[id(part)] < index]
        if earlier:
            return (
                f"{start} only {earlier[0].label} writes, in another branch of the same parallel; "
                f"put both into one branch, one after the other: task.serial(...)"
            )
        return (
            f"{start} only {others[0].label} writes, after it; use that one before it, or carry "
            f"the field over to the next step: ctx.keep({name!r})"
        )

    def _check_parts(self) -> None:
        """Check that something happens in each part: that a counter of the context grows there."""
        counters = tuple(self._words.counters)
        counting = [
            part
            for part in self._view.parts
            if not {qualified(name, part) for name in counters}.isdisjoint(
                name for item in self._all for name in item.writes
            )
        ]
        for part in self._view.parts if counters else ():
            if part in counting:
                continue
            item = next(item for item in self._all if item.part == part)
            names = [f"name={name!r}" for name in counting]
            self._problems.append(
                f"{item.label} has the name {part!r}, but nothing with that name writes "
                f"{' or '.join(f'ctx.{name}' for name in counters)}; give it the name of the "
                f"middleware that it belongs to: {', '.join([*names, 'or none'])}"
            )

    def _check_owners(self) -> None:
        owners: dict[object, PlanItem] = {}
        for item in self._active:
            for owned in item.declares.owns:
                owner = owners.setdefault(_identity(owned), item)
                if not _is_same_object(owner, item):
                    self._problems.append(
                        f"{item.label} and {owner.label} both use {_describe(owned)}, which only "
                        "one middleware may use; give each its own"
                    )

    def _check_stores(self) -> None:
        reported: list[object] = []
        for item in self._active:
            for store in item.declares.draws_from:
                if self._view.fills(store) or _has_data(store) or _is_in(store, reported):
                    continue
                reported.append(store)
                self._problems.append(
                    f"{item.label} draws from a {type(store).__name__}, which is empty and which "
                    f"no middleware fills; add {self._words.filler} before it or, if a custom "
                    "middleware fills it, declare that with @middleware(fills=(buffer,))"
                )

    def _ask_middleware(self) -> None:
        subjects: list[object] = []
        for item in self._active:
            subject = middleware_object(item.entry.middleware)
            if isinstance(subject, _TakesPartInCheck) and not _is_in(subject, subjects):
                subjects.append(subject)
                self._problems += [
                    f"{item.label}: {problem}"
                    for problem in subject.preflight(self._view.of(item.part))
                ]


def _shown_field(name: str) -> str:
    """Return a field for messages: ``ctx.obs``, or ``ctx.obs in the part 'red'``."""
    part, _, field = name.rpartition("/")
    return f"ctx.{field}" + (f" in the part {part!r}" if part else "")


def _shown_part(name: str | None) -> str:
    return "no part" if name is None else f"the part {name!r}"


def _declares_fields(declares: Declarations) -> bool:
    """Return whether a middleware declares fields, and therefore probably all that it writes."""
    return bool(declares.reads or declares.writes or declares.receives)


def _every(items: Iterable[PlanItem]) -> Iterable[PlanItem]:
    for item in items:
        yield item
        yield from _every(item.children)


def _identity(owned: object) -> object:
    """Return a key that is equal for the same object, and for paths of the same file."""
    return Path(owned).absolute() if isinstance(owned, str | os.PathLike) else id(owned)


def _is_same_object(one: PlanItem, other: PlanItem) -> bool:
    return middleware_object(one.entry.middleware) is middleware_object(other.entry.middleware)


def _is_in(wanted: object, items: Iterable[object]) -> bool:
    # Not with "in": a buffer may define == for its rows.
    return any(item is wanted for item in items)


def _has_data(store: object) -> bool:
    return isinstance(store, Sized) and len(store) > 0


def _describe(subject: object) -> str:
    if isinstance(subject, str | os.PathLike):
        return f"the path {os.fspath(subject)}"
    return f"the same {type(subject).__name__}"
