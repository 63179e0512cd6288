"""``ding.framework.task``: the one global task, a face of the running Task."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any, Final

from dmiddleware.ding.framework.row_view import seen_by_rows
from dmiddleware.errors import TaskStateError, WaitTimeout
from dmiddleware.pipeline import Context
from dmiddleware.pipeline import Task as CoreTask
from dmiddleware.pipeline.by_hand import Wrapped
from dmiddleware.pipeline.current_node import current_node
from middleware import Role

__all__ = ["Role", "Task", "VoidMiddleware", "task"]

_LONGEST_WAIT_S: Final = 3600.0
_ENDLESS: Final = 10**9


class VoidMiddleware:
    """Does nothing; a task leaves it out."""

    def __call__(self, ctx: Any) -> None:
        """Do nothing."""


class _RouterFace:
    """What programs read of the router, also before a task is started."""

    @property
    def is_active(self) -> bool:
        """Whether this process is one of several."""
        return current_node() is not None

    @property
    def node_id(self) -> int:
        """The number of this process in the run."""
        node = current_node()
        return 0 if node is None else node.node_id

    @property
    def labels(self) -> set[str]:
        """The labels of this process."""
        node = current_node()
        return set() if node is None else set(node.labels)


class ProgramTask(CoreTask[Any]):
    """A task whose roles the program gives, and whose users' middleware see rows."""

    def use(self, mw: Any, **options: Any) -> Any:
        """Add a middleware; what was made for another role is left out."""
        if isinstance(mw, VoidMiddleware):
            return self
        return super().use(seen_by_rows(mw), **options)

    def wrap(self, mw: Any, **options: Any) -> Any:
        """Return a middleware to call by hand, which returns its way back to call."""
        wrapped = super().wrap(seen_by_rows(mw), **options)
        return Wrapped(wrapped.entry, lambda ctx: wrapped(ctx).back)  # type: ignore[arg-type, return-value]

    def run(self, max_step: int | None = None) -> None:
        """Run the chain, without a limit if it is DI-engine's default of 10**12 steps."""
        super().run(max_step if max_step is not None and max_step < _ENDLESS else None)

    def backward(self) -> Any:
        """Go back through what was called by hand."""
        super().backward()
        return self

    def sync(self, **options: Any) -> Any:
        """Wait until the handlers of all events have run."""
        super().sync(**options)
        return self

    def wait_for(  # type: ignore[override]
        self,
        event: Any,
        timeout: float = float("inf"),
        ignore_timeout_exception: bool = True,
        timeout_s: float | None = None,
    ) -> Any:
        """Wait for an event, at most an hour.

        Returns:
            Its arguments, ``(args, kwargs)``; None after the timeout, unless that is to raise.
        """
        seconds = min(timeout, _LONGEST_WAIT_S) if timeout_s is None else timeout_s
        try:
            return super().wait_for(event, seconds)
        except WaitTimeout:
            if ignore_timeout_exception and timeout_s is None:
                return None
            raise


class _GlobalTask:
    """The task of a program of DI-engine; ``start`` makes a new Task behind it."""

    role: Final = SimpleNamespace(
        LEARNER=Role.LEARNER, COLLECTOR=Role.COLLECTOR, EVALUATOR=Role.EVALUATOR, FETCHER="fetcher"
    )
    router: Final = _RouterFace()

    def __init__(self) -> None:
        self._task: ProgramTask | None = None

    def start(
        self,
        async_mode: bool = False,
        n_async_workers: int = 3,
        ctx: Context | None = None,
        labels: Iterable[str] | None = None,
    ) -> ProgramTask:
        """Make the task; use it in a ``with``.

        Args:
            async_mode: no effect: middleware run in order. ``task.parallel`` runs some at once.
            n_async_workers: no effect.
            ctx: the first context.
            labels: names of this process.
        """
        options: dict[str, Any] = {} if ctx is None else {"ctx": ctx}
        self._task = ProgramTask(labels=tuple(labels or ()), **options)
        return self._task

    def void(self) -> VoidMiddleware:
        """Return a middleware that does nothing."""
        return VoidMiddleware()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if self._task is None:
            raise TaskStateError(
                f"task.{name} needs a started task; write `with task.start(ctx=...):` first"
            )
        return getattr(self._task, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "_task" or self._task is None:
            object.__setattr__(self, name, value)
        else:
            setattr(self._task, name, value)


def Task(  # noqa: N802 (DI-engine's name)
    async_mode: bool = False,
    n_async_workers: int = 3,
    ctx: Context | None = None,
    labels: Iterable[str] | None = None,
) -> ProgramTask:
    """Make a task that is not the global one."""
    return _GlobalTask().start(async_mode, n_async_workers, ctx, labels)


task: Final = _GlobalTask()

Middleware = Callable[[Any], Any]
