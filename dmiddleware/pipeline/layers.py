"""Layers: middleware that other middleware, or a program of its own, run by hand."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Generic, TypeVar

from dmiddleware.pipeline.chain import Entry
from dmiddleware.pipeline.context import Context
from dmiddleware.pipeline.onion import Chain, Frames, backward, forward, merge_errors, unwind

__all__ = ["Layer", "Wrapped"]

C = TypeVar("C", bound=Context)


class Layer:
    """A middleware whose way forward has run, and whose way back is still to come.

    Take it back with :meth:`back`, or use it in a ``with``, which also unwinds it when the block
    raises. A layer that no one takes back is taken back by the task at the end of the step.

    Args:
        chain: the compiled middleware; its way forward runs here.
        ctx: the context.
    """

    def __init__(self, chain: Chain, ctx: Context) -> None:
        self._frames: Frames = []
        try:
            forward(chain.steps, ctx, self._frames)
        except BaseException as error:
            leaving = unwind(self._frames, error)
            if leaving is not error:
                raise leaving from leaving.__cause__
            raise

    @property
    def is_open(self) -> bool:
        """Whether something is still suspended."""
        return bool(self._frames)

    def back(self) -> None:
        """Run the way back; twice is fine."""
        try:
            backward(self._frames)
        except BaseException as error:
            leaving = unwind(self._frames, error)
            if leaving is not error:
                raise leaving from leaving.__cause__
            raise

    def unwind(self, error: BaseException) -> BaseException:
        """Throw an error into what is suspended, and return what is to be raised."""
        return unwind(self._frames, error)

    def close(self) -> None:
        """Run the ``finally`` blocks of what is suspended, and nothing else of it; twice is fine.

        Raises:
            BaseException: what they raise; all of them have run then.
        """
        errors: list[BaseException] = []
        while self._frames:
            step, generator = self._frames.pop()
            try:
                generator.close()
            except BaseException as error:  # noqa: BLE001 (raised below)
                error.add_note(f"in {step.label} while it was closed")
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
            return
        leaving = unwind(self._frames, error)
        if leaving is not error:
            raise leaving from leaving.__cause__


class Wrapped(Generic[C]):
    """A middleware that can be called from within another; made by ``task.wrap``.

    Used in a chain, it is the middleware itself, with its lock.

    Args:
        entry: the middleware.
        begin: runs its way forward.
    """

    def __init__(self, entry: Entry, begin: Callable[[C], Layer]) -> None:
        self.entry = entry
        self._begin = begin

    def __call__(self, ctx: C) -> Layer:
        """Run the way forward, and return the layer, which is to be taken back."""
        return self._begin(ctx)
