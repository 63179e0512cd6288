"""The compiled chain against a literal interpreter of the rules of the onion.

The interpreter works on descriptions of middleware, without generators and without compiling. It
keeps a plain list of the suspended ones, and looks up in its description what each one does.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dmiddleware import Context, MiddlewareError, Task
from dmiddleware.pipeline import SkipRest
from dmiddleware.testing import Tape

ROLES = ("learner", "collector")
ON_ERROR = ("pass", "pass", "swallow", "raise", "translate", "yield")


class Boom(Exception):
    """Raised by the middleware of that name."""


@dataclass
class Leaf:
    yields: int
    fails: str | None
    on_error: str
    role: str | None
    name: str = ""
    strand: tuple[str, ...] = ()


@dataclass
class Serial:
    children: list
    locked: bool
    name: str = ""


@dataclass
class Parallel:
    children: list
    name: str = ""


@dataclass(frozen=True)
class Failure:
    """The compared parts of an error: the middleware that raised it, its cause, its members."""

    name: str
    cause: Failure | None = None
    members: tuple[Failure, ...] = ()


def failure_of(error):
    if isinstance(error, ExceptionGroup):
        return Failure("group", members=tuple(failure_of(e) for e in error.exceptions))
    if isinstance(error, MiddlewareError):
        assert "yielded a second time" in str(error)
        return Failure("second yield of " + str(error).split("(")[1].split(")")[0])
    assert isinstance(error, Boom)
    cause = failure_of(error.__cause__) if error.__cause__ is not None else None
    return Failure(str(error), cause)


SKIP = Failure("the rest is skipped")


@dataclass
class Box:
    """A suspended group: a locked serial, or the branches of a parallel."""

    branches: list
    parallel: bool


@dataclass
class Interpreter:
    roles: frozenset
    marks: list = field(default_factory=list)

    def step(self, nodes):
        suspended, error = self.forward(nodes)
        if error is None or error is SKIP:
            error = self.backward(suspended)
        return error if error is None else self.unwind(suspended, error)

    def forward(self, nodes):
        """Run forward; return the suspended ones, and the error, or SKIP, that ended it."""
        suspended = []
        for node in nodes:
            if isinstance(node, Leaf):
                error = self.forward_leaf(node, suspended)
            elif isinstance(node, Parallel):
                error = self.forward_parallel(node, suspended)
            elif node.locked:
                error = self.forward_locked(node, suspended)
            else:
                more, error = self.forward(node.children)
                suspended += more
            if error is not None:
                return suspended, error
        return suspended, None

    def forward_leaf(self, leaf, suspended):
        if leaf.role is not None and self.roles and leaf.role not in self.roles:
            return None
        self.marks.append((leaf.name, leaf.strand))
        if leaf.fails == "forward":
            return Failure(leaf.name)
        if leaf.fails == "skip":
            return SKIP
        if leaf.yields:
            suspended.append(leaf)
        return None

    def forward_locked(self, node, suspended):
        inner, error = self.forward(node.children)
        if error is not None and error is not SKIP:
            return self.unwind(inner, error)
        if inner:
            suspended.append(Box([inner], parallel=False))
        return error

    def forward_parallel(self, node, suspended):
        branches, errors = [], []
        for child in node.children:
            inner, error = self.forward([child])
            if error is not None and error is not SKIP:
                errors.append(self.unwind(inner, error))
            branches.append(inner)
        box = Box(branches, parallel=True)
        if errors:
            return self.unwind([box], Failure("group", members=tuple(errors)))
        if any(branches):
            suspended.append(box)
        return None

    def backward(self, suspended):
        while suspended:
            one = suspended.pop()
            error = self.back_box(one) if isinstance(one, Box) else self.back_leaf(one)
            if error is not None:
                return error
        return None

    def back_leaf(self, leaf):
        self.marks.append(("/" + leaf.name, leaf.strand))
        if leaf.fails == "back":
            return Failure(leaf.name)
        if leaf.yields == 2:
            return Failure("second yield of " + leaf.name)
        return None

    def back_box(self, box):
        errors = []
        for branch in box.branches:
            error = self.backward(branch)
            if error is not None:
                errors.append(self.unwind(branch, error))
        if not errors:
            return None
        if not box.parallel:
            return errors[0]
        return self.unwind([box], Failure("group", members=tuple(errors)))

    def unwind(self, suspended, error):
        """Throw the error into all of them; return the error that leaves."""
        further = []
        error = self.throw(suspended, error, further)
        return error if not further else Failure("group", members=(error, *further))

    def throw(self, suspended, error, further):
        while suspended:
            one = suspended.pop()
            if isinstance(one, Box):
                for branch in reversed(one.branches):
                    error = self.throw(branch, error, further)
                continue
            self.marks.append(("!" + one.name, one.strand))
            if one.on_error == "raise":
                further.append(Failure(one.name + " cleaning"))
            elif one.on_error == "translate":
                error = Failure(one.name + " translating", error)
            elif one.on_error == "yield":
                further.append(Failure("second yield of " + one.name))
        return error


def build(node, task, tape):
    if isinstance(node, Serial):
        return task.serial(*(build(child, task, tape) for child in node.children))
    if isinstance(node, Parallel):
        return task.parallel(*(build(child, task, tape) for child in node.children))
    mw = generator_of(node, tape) if node.yields else function_of(node, tape)
    mw.__name__ = node.name
    mw.roles = (node.role,) if node.role is not None else ()
    return mw


def function_of(leaf, tape):
    def function(ctx):
        tape(leaf.name, leaf.strand)
        fail_forward(leaf)

    return function


def fail_forward(leaf):
    if leaf.fails == "forward":
        raise Boom(leaf.name)
    if leaf.fails == "skip":
        raise SkipRest


def generator_of(leaf, tape):
    def generator(ctx):
        tape(leaf.name, leaf.strand)
        fail_forward(leaf)
        try:
            yield
        except Exception as error:  # noqa: BLE001 (reacting is what the description asks)
            tape("!" + leaf.name, leaf.strand)
            yield from react(leaf, error)
            return
        tape("/" + leaf.name, leaf.strand)
        if leaf.fails == "back":
            raise Boom(leaf.name)
        if leaf.yields == 2:
            yield

    return generator


def react(leaf, error):
    """Handle an error that was thrown in as the description says."""
    if leaf.on_error == "raise":
        raise Boom(leaf.name + " cleaning")
    if leaf.on_error == "translate":
        raise Boom(leaf.name + " translating") from error
    if leaf.on_error == "yield":
        yield
    if leaf.on_error == "pass":
        raise error


leaf_of = st.builds(
    Leaf,
    yields=st.sampled_from((0, 1, 1, 1, 2)),
    fails=st.sampled_from((None, None, None, "forward", "back", "skip")),
    on_error=st.sampled_from(ON_ERROR),
    role=st.sampled_from((None, None, *ROLES)),
)
node_of = st.recursive(
    leaf_of,
    lambda inner: st.one_of(
        st.builds(Serial, st.lists(inner, min_size=1, max_size=4), st.just(False)),
        st.builds(Parallel, st.lists(inner, min_size=1, max_size=3)),
    ),
    max_leaves=6,
)
locked = st.builds(Serial, st.lists(node_of, min_size=1, max_size=4), st.just(True))
chains = st.lists(st.one_of(node_of, node_of, locked), min_size=1, max_size=5)


def name_all(nodes, prefix="", strand=()):
    for number, node in enumerate(nodes, start=1):
        node.name = f"{prefix}{number}"
        if isinstance(node, Leaf):
            node.strand = strand
        elif isinstance(node, Serial):
            name_all(node.children, f"{node.name}.", strand)
        else:
            for branch, child in enumerate(node.children, start=1):
                inner = (*strand, f"{node.name}/{branch}")
                name_all([child], f"{node.name}.{branch}.", inner)


def seen_from(marks, strand):
    """Return the marks of this branch and of the chain around it, whose order is certain."""
    return [name for name, own in marks if own == strand[: len(own)]]


@settings(max_examples=100, deadline=None)
@given(chains, st.sets(st.sampled_from(ROLES)), st.booleans())
def test_the_compiled_chain_agrees_with_the_interpreter(nodes, roles, wrapped):
    name_all(nodes)
    tape = Tape()
    with Task(Context(), roles=roles) as task:
        for node in nodes:
            task.use(build(node, task, tape), lock=getattr(node, "locked", False))
        for role in roles:  # every role needs a middleware
            task.use(lambda ctx: None, roles=(role,))
        if wrapped:
            task.use_wrapper(passing_on)
        interpreter = Interpreter(frozenset(roles))
        for _ in range(2):
            expected = interpreter.step(nodes)
            happened = run_step(task)
            assert happened == expected
    marks = list(tape)
    for strand in {own for _, own in marks} | {own for _, own in interpreter.marks}:
        assert seen_from(marks, strand) == seen_from(interpreter.marks, strand)


def run_step(task):
    try:
        task.run(max_step=1)
    except (Boom, MiddlewareError, ExceptionGroup) as error:
        check_notes(error)
        return failure_of(error)
    return None


def check_notes(error):
    """The first note of every error names the middleware that raised it."""
    if isinstance(error, ExceptionGroup):
        for member in error.exceptions:
            check_notes(member)
    elif isinstance(error, Boom):
        assert f"({str(error).split()[0]})" in error.__notes__[0]


def passing_on(mw):
    def wrapper(ctx):
        result = mw(ctx)
        if result is not None:
            yield from result

    wrapper.__name__ = mw.__name__
    return wrapper


@pytest.mark.parametrize("fails", ["forward", "back"])
def test_the_interpreter_distinguishes_failures(fails):
    leaf = Leaf(yields=1, fails=fails, on_error="pass", role=None)
    name_all([leaf])
    with contextlib.suppress(Boom):
        assert Interpreter(frozenset()).step([leaf]) == Failure("1")
