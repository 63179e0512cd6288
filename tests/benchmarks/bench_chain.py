"""A chain of 64 no-op middleware.

The task runs whole steps: forward, back, and the renewal of the context. The reference is a bare
`for` loop that calls the same functions, or that resumes the same generators once, and then once
more in reverse. Timers, events and the description of the chain exist but are not used; the last
row shows the cost of the timer when it is used.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import Any

from dmiddleware import Context, StepTimer, Task
from middleware import OnlineRLContext
from tests.benchmarks.report import Row, interleaved

LENGTH = 64
STEPS = 200
REPEATS = 25


def rows() -> list[Row]:
    """Measure the chain rows of the bars."""
    functions = [_function() for _ in range(LENGTH)]
    generators = [_generator() for _ in range(LENGTH)]
    return [
        _row("64 functions", functions, _call_all, at_most=4.0),
        _row("64 generators", generators, _resume_all, at_most=3.0),
        _row("64 functions, each timed", functions, _call_all, timed=True),
    ]


def _row(
    name: str,
    middleware: list[Callable[[Context], Any]],
    reference: Callable[[list[Callable[[Context], Any]], Context], None],
    *,
    at_most: float | None = None,
    timed: bool = False,
) -> Row:
    ctx = OnlineRLContext()

    def bare() -> None:
        for _ in range(STEPS):
            reference(middleware, ctx)

    with _task(middleware, timed=timed) as task:
        pair = interleaved(lambda: task.run(STEPS), bare, repeats=REPEATS)
    return Row.of_time(name, pair, calls=STEPS, against="bare for loop", at_most=at_most)


@contextmanager
def _task(
    middleware: list[Callable[[Context], Any]], *, timed: bool
) -> Iterator[Task[OnlineRLContext]]:
    with Task(OnlineRLContext()) as task:
        if timed:
            task.use_wrapper(StepTimer())
        for one in middleware:
            task.use(one)
        task.run(1)
        yield task


def _call_all(middleware: list[Callable[[Context], Any]], ctx: Context) -> None:
    for function in middleware:
        function(ctx)


def _resume_all(middleware: list[Callable[[Context], Any]], ctx: Context) -> None:
    suspended = []
    for function in middleware:
        generator = function(ctx)
        next(generator)
        suspended.append(generator)
    for generator in reversed(suspended):
        next(generator, None)


def _function() -> Callable[[Context], None]:
    def nothing(ctx: Context) -> None:
        return None

    return nothing


def _generator() -> Callable[[Context], Generator[None, None, None]]:
    def nothing(ctx: Context) -> Generator[None, None, None]:
        yield

    return nothing
