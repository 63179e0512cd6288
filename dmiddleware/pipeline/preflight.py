"""The check before the first step: every problem of a chain at once, each with its remedy."""

from __future__ import annotations

import difflib
import enum
from collections.abc import Collection, Iterable, Sequence

from dmiddleware.errors import ChainError
from dmiddleware.pipeline.chain import PlanItem, leaves
from dmiddleware.pipeline.context import Context, FieldKind
from dmiddleware.pipeline.middleware import Role, is_generator_middleware
from dmiddleware.registry import nearest

__all__ = ["check_chain"]

# What of the stock middleware writes a field.
_WRITERS = {
    "obs": "a collector such as StepCollector(policy.collect_mode, env, n_sample=...)",
    "action": "a collector such as StepCollector(policy.collect_mode, env, n_sample=...)",
    "inference_output": "a collector such as StepCollector(policy.collect_mode, env, n_sample=...)",
    "trajectories": "StepCollector(policy.collect_mode, env, n_sample=...)",
    "trajectory_end_idx": "StepCollector(policy.collect_mode, env, n_sample=...)",
    "episodes": "EpisodeCollector(policy.collect_mode, env, n_episode=...)",
    "train_data": (
        "offpolicy_data_fetcher(buffer, batch_size=...), gae_estimator(policy.learn_mode) or "
        "offline_data_fetcher(dataset, batch_size=...)"
    ),
    "train_output": "a learner such as OffPolicyLearner(policy.learn_mode, buffer, batch_size=...)",
    "eval_value": "interaction_evaluator(policy.eval_mode, env, n_episode=...)",
    "eval_output": "interaction_evaluator(policy.eval_mode, env, n_episode=...)",
}

# A name so close to a known one is a slip of the pen, not a new name.
_SLIP = 0.8


def check_chain(
    nodes: Sequence[PlanItem],
    ctx: Context,
    roles: frozenset[str],
    *,
    has_peers: bool = False,
    run_roles: Collection[str] | None = None,
) -> None:
    """Refuse a chain that cannot run.

    Args:
        nodes: the plan.
        ctx: the context of the first step.
        roles: the task's.
        has_peers: whether there are other processes, from which fields may arrive.
        run_roles: the roles that the processes of the run have; None: unknown.

    Raises:
        ChainError: with all problems, and the remedy of each.
    """
    problems = _Check(nodes, ctx, roles, has_peers=has_peers, run_roles=run_roles).problems()
    if problems:
        listed = "".join(f"\n  {n}. {problem}" for n, problem in enumerate(problems, start=1))
        raise ChainError(f"the chain cannot run; {len(problems)} problem(s):{listed}")


class _Check:
    def __init__(
        self,
        nodes: Sequence[PlanItem],
        ctx: Context,
        roles: frozenset[str],
        *,
        has_peers: bool,
        run_roles: Collection[str] | None,
    ) -> None:
        self._run_roles = run_roles
        self._has_peers = has_peers
        self._nodes = nodes
        self._ctx = ctx
        self._roles = roles
        self._kinds = ctx.field_kinds()
        self._all = list(leaves(nodes))
        self._active = [node for node in self._all if node.active]
        self._order = {node.path: number for number, node in enumerate(self._all)}
        self._problems: list[str] = []

    def problems(self) -> list[str]:
        if not self._nodes:
            return ["it is empty; give it something to do with task.use(...)"]
        self._check_roles()
        self._check_locks(self._nodes, held=())
        self._check_fields(self._nodes, set())
        for node in self._active:
            for name in node.writes:
                self._check_write(node, name)
        return self._problems

    def _check_roles(self) -> None:
        declared = set(_declared_roles(self._nodes))
        # A chain without any roles runs as a whole in every process.
        for role in sorted(self._roles - declared) if declared else ():
            self._problems.append(
                f"the task has the role {str(role)!r}, but the chain has middleware only for "
                f"{', '.join(sorted(declared))}; declare roles=({str(role)!r},) for the middleware "
                "of this role, or start no process with it"
            )
        if self._run_roles is not None and Role.LEARNER not in self._run_roles:
            learns = [node for node in self._all if set(node.entry.roles) == {Role.LEARNER}]
            if learns:
                self._problems.append(
                    f"{learns[0].label} is for the learner, but no process of the run is one (its "
                    f"roles: {', '.join(self._run_roles)}); start the run with a learner, as in "
                    "--roles learner=1,collector=2"
                )
        known = {*map(str, Role), *map(str, self._roles)}
        for node in _every(self._nodes):
            for role in node.entry.roles:
                # A member of an Enum was written down somewhere else, too: it is no slip.
                near = [] if isinstance(role, enum.Enum) else _slips(role, known)
                if role not in known and near:
                    self._problems.append(
                        f"{node.label} is for the role {role!r}, which no one plays; did you mean "
                        f"{near[0]!r}? A role of your own is a member of your own StrEnum."
                    )

    def _check_locks(self, nodes: Iterable[PlanItem], held: tuple[object, ...]) -> None:
        for node in nodes:
            lock = node.entry.lock
            if lock is not None and any(lock is other for other in held):
                self._problems.append(
                    f"{node.label} would wait for ever for a lock that the parallel around it "
                    "holds; lock either the parallel or its members"
                )
            # Within one thread, the task's own lock may be taken again.
            inner = (*held, lock) if node.is_parallel and lock is not None else held
            self._check_locks(node.children, inner)

    def _check_fields(self, nodes: Iterable[PlanItem], written: set[str]) -> None:
        """Check the reads of the nodes, and add to ``written`` what they write."""
        for node in nodes:
            if not node.active:
                continue
            if node.is_parallel:
                branches = [set(written) for _ in node.children]
                for child, branch in zip(node.children, branches, strict=True):
                    self._check_fields((child,), branch)
                written.update(*branches)
            elif node.is_group:
                self._check_fields(node.children, written)
            else:
                for name in node.reads:
                    if name not in written and not self._is_satisfied(node, name):
                        self._problems.append(self._unwritten(node, name))
                written.update(node.writes)
                if self._has_peers:
                    written.update(node.receives)

    def _is_satisfied(self, node: PlanItem, name: str) -> bool:
        if self._kinds.get(name) in (FieldKind.KEPT, FieldKind.RENEWED):
            return True
        is_kept = self._ctx.is_kept(name)
        if is_kept and self._ctx.has_value(name):
            return True
        # What a later one writes arrives by the next step, or on the way back.
        arrives = is_kept or is_generator_middleware(node.entry.middleware)
        return arrives and any(name in other.writes for other in self._active)

    def _unwritten(self, node: PlanItem, name: str) -> str:
        start = f"{node.label} reads ctx.{name}, which"
        others = [other for other in self._active if name in other.writes and other is not node]
        if others:
            return self._written_elsewhere(node, name, others, start)
        silent = [other for other in self._all if name in other.writes and not other.active]
        if silent:
            roles = ", ".join(sorted(map(str, self._roles)))
            return (
                f"{start} {silent[0].label} writes, but that is silent in the role {roles}; have "
                "the field exchanged between the roles with a ContextExchanger before it"
            )
        if self._ctx.has_value(name):
            return (
                f"{start} is set now, but is gone after the first step; carry it over: "
                f"ctx.keep({name!r})"
            )
        if name in self._kinds or self._ctx.is_kept(name):
            writer = _WRITERS.get(name, f"a middleware that declares writes=({name!r},)")
            return f"{start} nothing before it writes; add {writer} before it"
        near = nearest(name, [known for known in self._kinds if known != "task"])
        hint = f"did you mean {', '.join(near)}? " if near else ""
        return (
            f"{start} is no field of {type(self._ctx).__name__}, and which nothing writes; {hint}"
            "A field of your own is declared in a subclass of the context, or written by a "
            f"middleware before it that declares writes=({name!r},)."
        )

    def _written_elsewhere(
        self, node: PlanItem, name: str, others: Sequence[PlanItem], start: str
    ) -> str:
        place = self._order[node.path]
        earlier = [other for other in others if self._order[other.path] < place]
        if earlier:
            return (
                f"{start} only {earlier[0].label} writes, in another branch of the same parallel; "
                f"put both into one branch, one after the other: task.serial(...)"
            )
        return (
            f"{start} only {others[0].label} writes, after it; use that one before it, or carry "
            f"the field over to the next step: ctx.keep({name!r})"
        )

    def _check_write(self, node: PlanItem, name: str) -> None:
        if name in self._kinds or name in self._ctx.__dict__ or self._ctx.is_kept(name):
            return
        if any(name in other.reads for other in self._active):
            return  # both mean the same field of their own
        near = _slips(name, [known for known in self._kinds if known != "task"])
        if near:
            self._problems.append(
                f"{node.label} writes ctx.{name}, which is no field of "
                f"{type(self._ctx).__name__} and which no one reads; did you mean {near[0]}?"
            )


def _declared_roles(nodes: Iterable[PlanItem]) -> Iterable[str]:
    for node in _every(nodes):
        yield from node.entry.roles


def _every(nodes: Iterable[PlanItem]) -> Iterable[PlanItem]:
    for node in nodes:
        yield node
        yield from _every(node.children)


def _slips(name: str, known: Iterable[str]) -> list[str]:
    return difflib.get_close_matches(name, list(known), n=1, cutoff=_SLIP)
