"""Middleware that other middleware call by hand."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Generic, TypeVar

from dmiddleware.pipeline.context import Context
from dmiddleware.pipeline.onion import (
    Chain,
    Frames,
    OnError,
    backward,
    forward,
    merge_errors,
    unwind,
)
from dmiddleware.pipeline.plan import Entry

__all__ = ["Layer", "Wrapped"]

C = TypeVar("C", bound=Context)


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
