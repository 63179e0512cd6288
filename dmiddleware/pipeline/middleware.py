"""Middleware: what may be used in a chain, and what it declares about itself."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Generator, Iterable, Iterator
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from dmiddleware.errors import MiddlewareError
from dmiddleware.pipeline.context import Context

__all__ = [
    "Middleware",
    "Role",
    "Wrapper",
    "middleware",
    "check_middleware",
    "middleware_name",
    "middleware_location",
]

C = TypeVar("C", bound=Context)
F = TypeVar("F", bound=Callable[..., Any])

Middleware: TypeAlias = Callable[[C], Iterator[None] | None]
"""Any callable that takes the context; with one ``yield``, the rest runs on the way back."""

Wrapper: TypeAlias = Callable[[Middleware[C]], Middleware[C]]
"""Takes a middleware and returns one that does the same and something around it."""

_FACTORY = "__middleware_factory__"


class Role(StrEnum):
    """The part that a process plays in a run; own roles are members of an own ``StrEnum``."""

    LEARNER = "learner"
    COLLECTOR = "collector"
    EVALUATOR = "evaluator"


def middleware(
    *,
    roles: Iterable[str] = (),
    reads: Iterable[str] = (),
    writes: Iterable[str] = (),
    last_step: bool = False,
    factory: bool = False,
) -> Callable[[F], F]:
    """Declare what a middleware is for, what it reads and what it writes.

    The declarations become the attributes ``roles``, ``reads``, ``writes`` and ``last_step`` of
    what is decorated; a class may just as well define them itself. They are what the check before
    the first step, and ``task.describe()``, go by.

    Args:
        roles: the roles in which it is active; none means all.
        reads: fields of the context that must have been written before it runs.
        writes: fields of the context that it sets.
        last_step: it only looks at what others do, such as a logger, and takes part in the steps
            that follow a stop, in which an exchange hands out what peers had sent before.
        factory: what is decorated is a function that returns the middleware; the declarations go to
            each one that it returns.

    Example:
        >>> @middleware(roles=(Role.LEARNER,), reads=("train_data",), writes=("train_output",))
        ... def learn(ctx: Context) -> None: ...
        >>> learn.reads
        ('train_data',)
    """
    declared: dict[str, object] = {
        "roles": string_tuple(roles),
        "reads": string_tuple(reads),
        "writes": string_tuple(writes),
        "last_step": last_step,
    }

    def decorate(subject: F) -> F:
        if not factory:
            return _declare(subject, declared)

        @functools.wraps(subject)
        def build(*args: Any, **kwargs: Any) -> Any:
            return _declare(subject(*args, **kwargs), declared)

        setattr(build, _FACTORY, True)
        return build  # type: ignore[return-value]

    return decorate


def check_middleware(candidate: object) -> None:
    """Refuse what cannot be a middleware.

    Raises:
        MiddlewareError: with what was given, and what to give instead.
    """
    problem = _problem(candidate)
    if problem:
        raise MiddlewareError(f"cannot use {candidate!r} as a middleware: {problem}")


def middleware_name(subject: object) -> str:
    """Return the name of a middleware as it stands in messages and tables."""
    while isinstance(subject, functools.partial):
        subject = subject.func
    name = getattr(subject, "__name__", None)
    return name if isinstance(name, str) else type(subject).__name__


def middleware_location(subject: object) -> str:
    """Return where a middleware is defined, as ``file:line``, or an empty string."""
    while isinstance(subject, functools.partial):
        subject = subject.func
    function = (
        inspect.unwrap(subject)
        if inspect.isroutine(subject)
        else inspect.getattr_static(type(subject), "__call__", None)
    )
    code = getattr(function, "__code__", None)
    return f"{_short(code.co_filename)}:{code.co_firstlineno}" if code else ""


def is_generator_middleware(subject: object) -> bool:
    """Tell whether a middleware is known to have a way back."""
    while isinstance(subject, functools.partial):
        subject = subject.func
    return inspect.isgeneratorfunction(subject) or inspect.isgeneratorfunction(
        inspect.getattr_static(type(subject), "__call__", None)
    )


def string_tuple(names: Iterable[str]) -> tuple[str, ...]:
    # One string is an iterable of letters, which is never what was meant.
    return (names,) if isinstance(names, str) else tuple(names)


def _declare(subject: F, declared: dict[str, object]) -> F:
    if not inspect.isclass(subject):
        problem = _problem(subject)
        if problem:
            raise MiddlewareError(
                f"cannot declare {subject!r} as a middleware: {problem}; or decorate it with "
                "@middleware(..., factory=True) if it is a function that returns the middleware"
            )
    for attribute, value in declared.items():
        setattr(subject, attribute, value)
    return subject


def _problem(candidate: object) -> str | None:
    name = getattr(candidate, "__name__", type(candidate).__name__)
    if candidate is None:
        return "it is None; does the function that should return it lack its return statement?"
    if isinstance(candidate, Generator):
        return (
            f"it is a generator that was already called; "
            f"pass the function itself: use({name}), not use({name}(ctx))"
        )
    if inspect.isclass(candidate):
        return f"it is a class; build an object of it: use({name}(...))"
    if not callable(candidate):
        kind = type(candidate).__name__
        return f"a {kind} is not callable; a middleware is a callable that takes the context"
    if getattr(candidate, _FACTORY, False) or _returns_middleware(candidate):
        return f"it is a function that returns a middleware; call it: use({name}(...))"
    if _is_async(candidate):
        return "it is asynchronous; a middleware is a plain function or a generator function"
    return _signature_problem(candidate, name)


def _returns_middleware(candidate: object) -> bool:
    annotation = getattr(candidate, "__annotations__", {}).get("return")
    text = annotation if isinstance(annotation, str) else repr(annotation)
    return text.split("[")[0].split(".")[-1] in ("Middleware", "Callable")


def _is_async(candidate: object) -> bool:
    return any(
        inspect.iscoroutinefunction(f) or inspect.isasyncgenfunction(f)
        for f in (candidate, inspect.getattr_static(type(candidate), "__call__", None))
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
