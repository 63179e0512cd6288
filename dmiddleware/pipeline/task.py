"""The task: it runs the chain, step after step."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from typing import Any, Generic, Self, TypeVar

from dmiddleware.errors import TaskStateError
from dmiddleware.pipeline.context import Context
from dmiddleware.pipeline.declare import Middleware, check_middleware
from dmiddleware.seeding import derive_seed

__all__ = ["Task"]

C = TypeVar("C", bound=Context)


class Task(Generic[C]):
    """Runs a chain of middleware on a context, step after step (first version)."""

    def __init__(self, ctx: C, *, roles: Iterable[str] = (), seed: int = 0) -> None:
        self.ctx = ctx
        self.seed = seed
        self._roles = frozenset(roles)
        self._middleware: list[Middleware[C]] = []
        self._stop_reason: str | None = None
        self._set_up = False
        self._closed = False
        self._used = False
        ctx.task = self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    @property
    def finish(self) -> bool:
        """Whether the task was told to stop."""
        return self._stop_reason is not None

    @property
    def stop_reason(self) -> str | None:
        """Why the task was told to stop, or None."""
        return self._stop_reason

    @property
    def roles(self) -> frozenset[str]:
        """The task's roles."""
        return self._roles

    def has_role(self, role: str) -> bool:
        """Tell whether the task plays the role."""
        return not self._roles or role in self._roles

    def use(self, mw: Middleware[C], *, roles: Iterable[str] | None = None) -> Self:
        """Add a middleware to the end of the chain."""
        check_middleware(mw)
        self._middleware.append(mw)
        return self

    def stop(self, reason: str) -> None:
        """End the run when the current step is done."""
        self._stop_reason = self._stop_reason or reason

    def seed_for(self, *scope: str | int) -> int:
        """Derive the seed of one random generator."""
        return derive_seed(self.seed, *scope)

    def run(self, *, max_step: int | None = None) -> None:
        """Run the chain until the task is stopped."""
        if self._closed:
            raise TaskStateError("the task is closed")
        if not self._set_up:
            self._set_up = True
            for mw in self._middleware:
                if hasattr(mw, "setup"):
                    mw.setup(self)
        step = 0
        while not self.finish and (max_step is None or step < max_step):
            if self._used:
                self.ctx = self.ctx.renew()
            self._used = True
            self._step()
            step += 1

    def close(self) -> None:
        """Close the middleware in reverse order."""
        if self._closed:
            return
        self._closed = True
        for mw in reversed(self._middleware):
            if hasattr(mw, "close"):
                mw.close()

    def _step(self) -> None:
        suspended: list[Generator[None, None, Any]] = []
        try:
            for mw in self._middleware:
                result = mw(self.ctx)
                if isinstance(result, Generator):
                    next(result, None)
                    suspended.append(result)
            while suspended:
                next(suspended.pop(), None)
        finally:
            while suspended:
                suspended.pop().close()
