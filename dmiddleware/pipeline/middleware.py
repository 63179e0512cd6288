"""Middleware: what can be used in a chain, and what it declares about itself."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Collection, Generator, Iterable, Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Final, ParamSpec, Protocol, TypeAlias, TypeVar

from dmiddleware.errors import MiddlewareError
from dmiddleware.pipeline.context import Context, is_part_name
from dmiddleware.registry import edit_distance

__all__ = [
    "Middleware",
    "misspelled_role",
    "Wrapper",
    "middleware",
    "Declarations",
    "middleware_object",
    "check_middleware",
    "middleware_name",
    "middleware_location",
]

C = TypeVar("C", bound=Context)
F = TypeVar("F", bound=Callable[..., Any])
P = ParamSpec("P")

Middleware: TypeAlias = Callable[[C], Iterator[None] | None]
"""Any callable that takes the context; with one ``yield``, the rest runs on the way back."""

Wrapper: TypeAlias = Callable[[Middleware[C]], Middleware[C]]
"""Takes a middleware and returns one that does the same, with something added around it."""

_MISSING: Any = object()


def misspelled_role(name: str, known: Iterable[str]) -> str | None:
    """Return the known role for which ``name`` is a misspelling, or None.

    A name at an edit distance (insertions, deletions, replacements) of 1 or 2 is a misspelling; any
    other one is a custom role.
    """
    distances = ((edit_distance(name, role), role) for role in known)
    distance, nearest = min(distances, default=(0, ""))
    return nearest if 1 <= distance <= 2 else None


_HOOK: Final = {"is_hook": True}
"""The metadata of a function that objects have as a method of this name."""


@dataclass(frozen=True, kw_only=True)
class Declarations:
    """What a middleware declares about itself.

    An object declares it by attributes of these names, and a function with :func:`middleware`. The
    check before the first step and ``task.describe()`` use the declarations.

    Attributes:
        roles: the roles in which it is active; none means all.
        part_name: the named part of the chain that it belongs to. It then works on
            ``ctx.part(name)`` and on ``task.part(name)``, and is active in processes with a role
            ``"<role>:<part>"`` too; None: it belongs to the whole chain.
        joins_part: the part that it belongs to if other middleware of the chain do.
        with_parts: whether it is also active in processes with its role for a part,
            ``"<role>:<part>"``, if it belongs to none.
        reads: fields of the context that must have been written before it runs, those of its part;
            ``"red/obs"`` is the field of the part ``red``.
        writes: fields of the context that it sets.
        receives: further fields that it sets if there are other processes.
        owns: objects that only one middleware of a chain may use: env managers, run folders.
        fills: stores, such as buffers, to which it adds data.
        draws_from: stores from which it takes data, and which some middleware must fill.
        last_step: whether it only observes, as a logger does. It then also runs in the steps after
            a stop, in which an exchange delivers what peers had sent before.
        lead_only: whether only rank 0 runs it, of several processes that run the task as one.
        default_context: the context of a task that was built without one.
        preflight: called with the chain before the first step; returns what is wrong with it, each
            problem with its remedy. An object has a method of this name.
        bind: called with the chain before its set-up, to take what it needs from it. An object has
            a method of this name.
        setup: called with the task before its first step. An object has a method of this name.
        anything: whether it declares anything at all.
    """

    roles: Collection[str] = ()
    part_name: str | None = None
    joins_part: str | None = None
    with_parts: bool = False
    reads: Collection[str] = ()
    writes: Collection[str] = ()
    receives: Collection[str] = ()
    owns: Collection[object] = ()
    fills: Collection[object] = ()
    draws_from: Collection[object] = ()
    last_step: bool = False
    lead_only: bool = False
    default_context: type[Context] | None = None
    preflight: Callable[[Any], Iterable[str]] | None = field(default=None, metadata=_HOOK)
    bind: Callable[[Any], object] | None = field(default=None, metadata=_HOOK)
    setup: Callable[[Any], object] | None = field(default=None, metadata=_HOOK)
    anything: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        for declared in fields(self):
            if declared.default == ():
                value = getattr(self, declared.name)
                object.__setattr__(self, declared.name, string_tuple(value))
        for name in (self.part_name, self.joins_part):
            if name is not None and not is_part_name(name):
                raise MiddlewareError(
                    f"the name of a part of a chain consists of letters, digits, '_', '-' and '.', "
                    f"64 at most, got {name!r:.100}"
                )

    @classmethod
    def of(cls, subject: object) -> Declarations:
        """Return what a middleware declares, in the attributes of these names, without methods.

        A ``functools.partial`` has the declarations of its function, and a bound method has the
        declarations of its object that it does not make itself.
        """
        values: dict[str, Any] = {}
        for part in _parts(subject):
            for name in _ATTRIBUTES.difference(values):
                value = getattr(part, name, _MISSING)
                if value is not _MISSING:
                    values[name] = value
        declarations = cls(**values)
        object.__setattr__(declarations, "anything", bool(values))
        return declarations


_ATTRIBUTES: Final = frozenset(
    declared.name
    for declared in fields(Declarations)
    if declared.init and not declared.metadata.get("is_hook")
)


class _Decorator(Protocol):
    def __call__(self, subject: F, /) -> F: ...


def _taking(
    make: Callable[P, Declarations],
) -> Callable[[Callable[[Declarations], _Decorator]], Callable[P, _Decorator]]:
    """Let a function of declarations take what they are made of."""

    def decorate(function: Callable[[Declarations], _Decorator]) -> Callable[P, _Decorator]:
        @functools.wraps(function)
        def declare(*args: P.args, **kwargs: P.kwargs) -> _Decorator:
            return function(make(*args, **kwargs))

        setattr(declare, "__signature__", inspect.signature(make))  # noqa: B010 (not typed)
        return declare

    return decorate


@_taking(Declarations)
def middleware(declarations: Declarations) -> _Decorator:
    """Declare what a middleware is for, what it reads and what it writes.

    The arguments are those of :class:`Declarations`, by keyword. Each becomes an attribute of the
    decorated object; a class may also define these attributes itself. Functions, methods and
    classes can be decorated, and a ``functools.partial`` of a declared function has its
    declarations.

    Example:
        >>> @middleware(roles=("cook",), reads=("ingredients",), writes=("meal",))
        ... def cook(ctx: Context) -> None: ...
        >>> cook.reads
        ('ingredients',)
    """
    attributes = {
        declared.name: value
        for declared in fields(Declarations)
        if declared.init and (value := getattr(declarations, declared.name)) is not None
    }

    def decorate(subject: F) -> F:
        if not inspect.isclass(subject):
            # Other arguments of a function that takes ctx are bound later, by functools.partial.
            problem = _problem(subject, any_signature=_is_method(subject) or _takes_ctx(subject))
            if problem:
                raise MiddlewareError(
                    f"cannot declare {subject!r} as a middleware: {problem}; or, if it is a "
                    "function that returns the middleware, decorate the one that it returns"
                )
        for attribute, value in attributes.items():
            setattr(subject, attribute, value)
        return subject

    return decorate


def middleware_object(subject: object) -> object:
    """Return the object with a middleware's ``setup``, ``close`` and state.

    That is the object of a bound method, the function of a ``functools.partial``, and otherwise the
    middleware itself.
    """
    *_, owner = _parts(subject)
    return owner


def check_middleware(candidate: object) -> None:
    """Refuse an object that cannot be a middleware.

    Raises:
        MiddlewareError: with the object, and what to use instead.
    """
    problem = _problem(candidate)
    if problem:
        raise MiddlewareError(f"cannot use {candidate!r} as a middleware: {problem}")


def middleware_name(subject: object) -> str:
    """Return the name of a middleware for messages and tables."""
    function = _function_of(subject)
    name = None
    with contextlib.suppress(Exception):  # of an attribute of a user's class
        name = getattr(function, "__name__", None)
    return name if isinstance(name, str) else type(function).__name__


def middleware_location(subject: object) -> str:
    """Return where a middleware is defined, as ``file:line``, or an empty string."""
    function = _function_of(subject)
    called = inspect.unwrap(function) if inspect.isroutine(function) else _call_of(function)
    code = getattr(called, "__code__", None)
    return f"{_short(code.co_filename)}:{code.co_firstlineno}" if code else ""


def is_generator_middleware(subject: object) -> bool:
    """Return whether a middleware is known to have a way back."""
    function = _function_of(subject)
    return any(map(inspect.isgeneratorfunction, (function, _call_of(function))))


def string_tuple(names: Iterable[str]) -> tuple[str, ...]:
    """Return the names as a tuple; a single string is one name, not an iterable of characters."""
    return (names,) if isinstance(names, str) else tuple(names)


def _function_of(subject: Any) -> Any:
    """Return what a ``functools.partial`` calls in the end; anything else as it is."""
    while isinstance(subject, functools.partial):
        subject = subject.func
    return subject


def _call_of(subject: object) -> Any:
    """Return the ``__call__`` of an object's class, or None."""
    return inspect.getattr_static(type(subject), "__call__", None)


def _parts(subject: object) -> Iterator[object]:
    """Yield a middleware, then what it wraps, down to the object of a bound method."""
    yield subject
    while isinstance(subject, functools.partial):
        subject = subject.func
        yield subject
    if inspect.ismethod(subject) and not inspect.isclass(subject.__self__):
        yield subject.__self__


def _is_method(subject: object) -> bool:
    """Return whether a function is defined in the body of a class, from its qualified name."""
    if not inspect.isfunction(subject):
        return False
    scope = subject.__qualname__.rpartition(".")[0]
    return bool(scope) and not scope.endswith("<locals>")


def _takes_ctx(subject: object) -> bool:
    return inspect.isfunction(subject) and "ctx" in inspect.signature(subject).parameters


def _problem(candidate: object, *, any_signature: bool = False) -> str | None:
    name = getattr(candidate, "__name__", type(candidate).__name__)
    if candidate is None:
        return "it is None; does the function that should return it lack a return statement?"
    if isinstance(candidate, Generator):
        return (
            f"it is a generator that was already called; "
            f"pass the function itself: use({name}), not use({name}(ctx))"
        )
    if inspect.isclass(candidate):
        return f"it is a class; pass an instance: use({name}(...))"
    if not callable(candidate):
        kind = type(candidate).__name__
        return f"a {kind} is not callable; a middleware is a callable that takes the context"
    if _returns_middleware(candidate):
        return f"it is a function that returns a middleware; call it: use({name}(...))"
    if _is_async(candidate):
        return "it is asynchronous; use a plain function or a generator function"
    return None if any_signature else _signature_problem(candidate, name)


def _returns_middleware(candidate: object) -> bool:
    annotation = getattr(candidate, "__annotations__", {}).get("return")
    text = annotation if isinstance(annotation, str) else repr(annotation)
    return text.split("[")[0].split(".")[-1] in ("Middleware", "Callable")


def _is_async(candidate: object) -> bool:
    function = _function_of(candidate)
    return any(
        inspect.iscoroutinefunction(form) or inspect.isasyncgenfunction(form)
        for form in (function, _call_of(function))
    )


def _signature_problem(candidate: Callable[..., Any], name: str) -> str | None:
    try:
        signature = inspect.signature(candidate)
    except (TypeError, ValueError):  # some built-in functions have none
        return None
    try:
        signature.bind(None)
    except TypeError:
        return (
            f"it does not take the context as its only argument, its signature is {signature}; "
            f"is it a function that returns the middleware? Then call it: use({name}(...))"
        )
    return None


def _short(filename: str) -> str:
    try:
        return str(Path(filename).relative_to(Path.cwd()))
    except ValueError:
        return filename
