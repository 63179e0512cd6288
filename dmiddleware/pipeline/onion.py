"""The onion: one step through a chain, and back.

On the way forward, every middleware runs in order; one that yields is suspended there. On the way
back, the suspended ones are resumed in reverse order. When a middleware raises, the error is thrown
into every suspended one, in reverse order, so that ``finally`` blocks run, and then leaves the
chain:

- A middleware may catch the error that is thrown into it, to clean up, but cannot swallow it.
- A middleware may translate it: an error that it raises ``from`` the one thrown in replaces it.
- Any other error raised meanwhile does not replace the first: both leave in an ``ExceptionGroup``,
  the first one in front. An interrupt (``KeyboardInterrupt``, ``SystemExit``) is never wrapped.

A middleware that raises :class:`SkipRest` skips the rest of the way forward; that is not an error.

An error that leaves has a note that names the middleware that raised it.
"""

from __future__ import annotations

import logging
from collections.abc import (
    AsyncGenerator,
    Awaitable,
    Callable,
    Coroutine,
    Generator,
    Iterable,
    Sequence,
)
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial, update_wrapper
from types import GeneratorType, TracebackType
from typing import Any, TypeAlias, TypeVar

from dmiddleware.errors import MiddlewareError
from dmiddleware.pipeline.context import Context
from dmiddleware.pipeline.middleware import middleware_name

__all__ = [
    "SkipRest",
    "CompiledMiddleware",
    "Suspended",
    "Frames",
    "Chain",
    "around",
    "merge_errors",
    "OnError",
]

C = TypeVar("C", bound=Context)

_logger = logging.getLogger(__name__)


class SkipRest(Exception):
    """Raised by a middleware to skip the rest of the way forward; this is not an error.

    The way back runs as usual for the middleware that are suspended. Within a parallel branch, or a
    middleware that another middleware calls by hand, only the rest of the branch or of the called
    middleware is skipped. On the way back, it ends the middleware that raises it, and nothing else.
    """


Suspended: TypeAlias = Generator[Any, Any, Any]

_DONE: Any = object()

# An inner chain yields this when a middleware raises SkipRest after another one was suspended.
_SKIP: Any = object()


@dataclass(frozen=True, slots=True)
class CompiledMiddleware:
    """One compiled middleware.

    Attributes:
        call: the middleware; it returns None or a generator.
        label: its name in messages, such as ``middleware 3 (count)``.
    """

    call: Callable[[Any], object]
    label: str


Frames: TypeAlias = list[tuple[CompiledMiddleware, Suspended]]


class Chain:
    """A compiled chain.

    Args:
        members: in order of the way forward.
    """

    __slots__ = ("members",)

    def __init__(self, members: Iterable[CompiledMiddleware]) -> None:
        self.members = tuple(members)

    def run(self, ctx: Context) -> None:
        """Run the chain once, forward and back.

        Raises:
            MiddlewareError: when a middleware yields a second time, or returns a function.
        """
        frames: Frames = []
        try:  # faster than OnError
            forward(self.members, ctx, frames)
            backward(frames)
        except BaseException as error:
            leaving = unwind(frames, error)
            if leaving is error:
                raise
            raise leaving from leaving.__cause__

    def middleware(self, ctx: Context) -> Generator[Any, None, None]:
        """Run as one middleware of an outer chain, which runs the way back."""
        frames: Frames = []
        with OnError(partial(unwind, frames)):
            completed = forward(self.members, ctx, frames)
            if frames:
                yield None if completed else _SKIP
            elif not completed:
                raise SkipRest
            backward(frames)


def forward(members: Sequence[CompiledMiddleware], ctx: Context, frames: Frames) -> bool:
    """Run the way forward; suspended middleware are appended to ``frames``.

    Returns:
        Whether all of them ran; False when a middleware raised :class:`SkipRest`.
    """
    push = frames.append
    member = None
    try:
        for member in members:
            call = member.call  # a local variable is faster to call than an attribute
            result = call(ctx)
            if result is None:
                continue
            if type(result) is not GeneratorType and not _is_generator(result, member):
                continue
            mark = next(result, _DONE)  # type: ignore[call-overload]
            if mark is _DONE:
                continue
            push((member, result))  # type: ignore[arg-type]
            if mark is _SKIP:
                return False
    except SkipRest:
        return False
    except StopIteration as stop:
        # A generator further out would take it for its own end.
        error = RuntimeError("a middleware raised StopIteration")
        _note(error, member, "")
        raise error from stop
    except BaseException as error:
        _note(error, member, "")
        raise
    return True


def backward(frames: Frames) -> None:
    """Run the way back, the last suspended first; each is removed from ``frames`` first."""
    pop = frames.pop
    member = None
    try:
        while frames:
            try:
                while frames:
                    member, generator = pop()
                    if next(generator, _DONE) is not _DONE:
                        raise _second_yield(member.label, generator)
            except SkipRest:
                continue
    except BaseException as error:
        _note(error, member, " on the way back")
        raise


def unwind(frames: Frames, error: BaseException) -> BaseException:
    """Throw the error into every suspended middleware, the last first.

    Returns:
        The error to raise: the same one, or a group if there were further errors.
    """
    further: list[BaseException] = []
    return merge_errors(throw_all(frames, error, further), further)


def throw_all(frames: Frames, error: BaseException, further: list[BaseException]) -> BaseException:
    """Throw the error into every suspended middleware, the last first.

    Args:
        frames: the suspended middleware; empty afterwards.
        error: what to throw.
        further: other errors are appended here.

    Returns:
        The error, or the one into which a middleware translated it.
    """
    traceback = error.__traceback__
    while frames:
        member, generator = frames.pop()
        raised = _throw(member, generator, error)
        if raised is None:
            error.add_note(
                f"{member.label} caught it, but a middleware cannot swallow another one's error"
            )
        elif raised is not error:
            _note(raised, member, " while an error passed through it")
            continued, others = _part(raised, error)
            if continued is not error:
                error, traceback = continued, continued.__traceback__
            further += others
    error.__traceback__ = traceback  # without the detours through the suspended ones
    return error


def _part(
    raised: BaseException, thrown: BaseException
) -> tuple[BaseException, Sequence[BaseException]]:
    """Split what left a middleware into the error thrown in, or its translation, and others.

    An inner chain, like other code that unwinds several things, raises a group of the error that
    was thrown into it and of further ones.
    """
    if _comes_from(raised, thrown):
        return raised, ()
    members = raised.exceptions if isinstance(raised, BaseExceptionGroup) else ()
    for member in members:
        if _comes_from(member, thrown):
            return member, [member_left for member_left in members if member_left is not member]
    return thrown, (raised,)


def _comes_from(error: BaseException, source: BaseException) -> bool:
    """Return whether the error is the source, or was raised from it, directly or not."""
    visited: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in visited:
        if link is source:
            return True
        visited.add(id(link))
        link = link.__cause__
    return False


class OnError:
    """A context manager that replaces an error that leaves its block.

    Args:
        replace: takes the error and returns the error to raise, which may be the same.
    """

    __slots__ = ("_replace",)

    def __init__(self, replace: Callable[[BaseException], BaseException]) -> None:
        self._replace = replace

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is not None:
            replacement = self._replace(error)
            if replacement is not error:
                raise replacement from replacement.__cause__


def merge_errors(
    first: BaseException, further: Sequence[BaseException], *, what: str = "a step"
) -> BaseException:
    """Merge errors into one, without losing any.

    Args:
        first: the first error.
        further: errors raised while the first one was handled.
        what: the subject of the group's message.

    Returns:
        ``first`` if it is the only one; otherwise the first interrupt among them, with the others
        in its notes and in the log; otherwise an ``ExceptionGroup`` of all.
    """
    errors = [first, *further]
    if not further:
        return first
    interrupt = next((e for e in errors if not isinstance(e, Exception)), None)
    if interrupt is None:
        return ExceptionGroup(
            f"{what} failed with {type(first).__name__}, and with {len(further)} further error(s) "
            "while it was handled",
            [e for e in errors if isinstance(e, Exception)],
        )
    for error in errors:
        if error is not interrupt:
            interrupt.add_note(f"another error: {error!r}")
            _logger.error("an error in addition to %r", interrupt, exc_info=error)
    return interrupt


def around(
    call: Callable[[C], object],
    guard: Callable[[C, str], AbstractContextManager[object]],
) -> Callable[[C], Generator[Any, None, None]]:
    """Return a middleware that runs each of the two halves of ``call`` in a context manager.

    Wrappers such as timers, traces and locks are built with it.

    Args:
        call: the middleware to wrap.
        guard: called with the context and ``"forward"`` or ``"back"``; returns the context manager
            for that half, which must not swallow errors. An error that is thrown into the suspended
            middleware counts as its way back.
    """
    name = middleware_name(call)
    member = CompiledMiddleware(call, name)

    def guarded(ctx: C) -> Generator[Any, None, None]:
        with guard(ctx, "forward"):
            generator, mark = _start(member, ctx)
        if generator is None:
            return
        try:
            yield mark
        except BaseException as error:
            with guard(ctx, "back"):
                raised = _throw(member, generator, error)
                if raised is error:
                    raise
                if raised is not None:
                    raise raised  # noqa: B904 (its context is already the error)
            return
        with guard(ctx, "back"):
            if next(generator, _DONE) is not _DONE:
                raise _second_yield(name, generator)

    guarded.__name__ = name
    # Only where it is defined: what it declares and holds stays its own.
    update_wrapper(guarded, call, assigned=(), updated=())
    return guarded


def _start(member: CompiledMiddleware, ctx: Context) -> tuple[Suspended | None, object]:
    """Run the way forward; return the suspended generator, if any, and what it yielded."""
    result: Any = member.call(ctx)
    if result is None or not _is_generator(result, member):
        return None, None
    mark = next(result, _DONE)
    return (None, None) if mark is _DONE else (result, mark)


def _throw(
    member: CompiledMiddleware, generator: Suspended, error: BaseException
) -> BaseException | None:
    """Return the error that leaves: the same one, another one, or None if it was caught."""
    try:
        generator.throw(error)
    except (StopIteration, SkipRest):
        return None
    except BaseException as raised:  # noqa: BLE001 (the caller raises it)
        return raised
    return _second_yield(member.label, generator)


def _is_generator(result: object, member: CompiledMiddleware) -> bool:
    if isinstance(result, Generator):
        return True
    if callable(result):
        raise MiddlewareError(
            f"{member.label} returned {result!r}, which is callable; if it is a function that "
            "returns a middleware, call it: use(build(...))"
        )
    if isinstance(result, Awaitable | AsyncGenerator):
        if isinstance(result, Coroutine):
            result.close()
        raise MiddlewareError(
            f"{member.label} returned {result!r}; a middleware is not asynchronous, use a plain "
            "function or a generator function"
        )
    return False


def _second_yield(label: str, generator: Suspended) -> MiddlewareError:
    """Close the generator that yielded twice, and describe where it did."""
    frame, code = getattr(generator, "gi_frame", None), getattr(generator, "gi_code", None)
    place = (
        f" in {code.co_qualname}, {code.co_filename} line {frame.f_lineno},"
        if frame is not None and code is not None
        else ""
    )
    error = MiddlewareError(
        f"{label} yielded a second time{place} but a middleware yields at most once: the code "
        "before the yield runs on the way forward, the code after it on the way back"
    )
    try:
        generator.close()
    except BaseException as raised:  # noqa: BLE001 (noted on the error that is raised)
        error.add_note(f"closing it raised {raised!r}")
    return error


def _note(error: BaseException, member: CompiledMiddleware | None, where: str) -> None:
    note = f"in {member.label}{where}" if member is not None else "before the first middleware"
    # A wrapped middleware is compiled twice, with the same label.
    if note not in getattr(error, "__notes__", ()):
        error.add_note(note)
