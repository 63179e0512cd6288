"""Parallel branches: chains that run at the same time on one context, each on its own thread."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextvars import ContextVar
from functools import partial

from dmiddleware.pipeline.context import Context
from dmiddleware.pipeline.onion import (
    Chain,
    Frames,
    OnError,
    backward,
    forward,
    merge_errors,
    throw_all,
    unwind,
)

__all__ = ["Branches", "branch_failure"]

_logger = logging.getLogger(__name__)


class _Pass:
    """One pass through parallel branches: the first failure among them, and the pass around it."""

    __slots__ = ("_failure", "_outer")

    def __init__(self, outer: _Pass | None) -> None:
        self._failure: BaseException | None = None
        self._outer = outer

    @property
    def failure(self) -> BaseException | None:
        """The first error of a branch, in this pass or in one around it."""
        if self._failure is None and self._outer is not None:
            return self._outer.failure
        return self._failure

    def fail(self, error: BaseException) -> None:
        if self._failure is None:
            self._failure = error


_current_pass: ContextVar[_Pass | None] = ContextVar("dmiddleware.parallel_pass", default=None)


def branch_failure() -> Callable[[], BaseException | None]:
    """Return a function that returns the error of a branch beside the caller's, or None."""
    current = _current_pass.get()
    return lambda: None if current is None else current.failure


class Branches:
    """Runs chains in parallel on the same context.

    A branch has its own thread for all its steps, in both directions, so its middleware may depend
    on the thread (a renderer's context, for example). All branches are joined before the
    step continues, and again on the way back, which they also run in parallel.

    When branches fail, the others finish the direction they are in, and their ``task.wait_for``
    ends at once. A failed branch is unwound with its own error, then the suspended middleware of
    the others with the ``ExceptionGroup`` of all errors, branch after branch in reverse order, each
    on its own thread.

    Args:
        chains: the branches.
        label: the name of the parallel in messages.
        on_failure: called when a branch fails, on its thread.
        report_s: the interval in seconds at which the log names the branches still running.
    """

    def __init__(
        self,
        chains: Iterable[Chain],
        label: str,
        *,
        on_failure: Callable[[], object] = lambda: None,
        report_s: float = 60.0,
    ) -> None:
        self._chains = tuple(chains)
        self._label = label
        self._on_failure = on_failure
        self._report_s = report_s
        self._threads: tuple[ThreadPoolExecutor, ...] = ()
        self._abandoned = False

    def middleware(self, ctx: Context) -> Generator[None, None, None]:
        """Run as one middleware of an outer chain."""
        if not self._threads:
            self._threads = tuple(
                ThreadPoolExecutor(1, thread_name_prefix=f"{self._label} branch {number}")
                for number in range(1, len(self._chains) + 1)
            )
        frames: list[Frames] = [[] for _ in self._chains]
        this_pass = _Pass(_current_pass.get())
        with OnError(partial(self._unwind_all, frames)):
            self._run_all(
                this_pass,
                frames,
                [
                    partial(forward, chain.members, ctx, mine)
                    for chain, mine in zip(self._chains, frames, strict=True)
                ],
            )
            if any(frames):
                yield
            self._run_all(this_pass, frames, [partial(backward, mine) for mine in frames])

    def close(self) -> None:
        """End the threads, which are idle between steps; may be called twice."""
        for thread in self._threads:
            thread.shutdown(wait=not self._abandoned)
        self._threads = ()

    def _run_all(
        self,
        this_pass: _Pass,
        frames: Sequence[Frames],
        halves: Sequence[Callable[[], object]],
    ) -> None:
        futures = [
            thread.submit(self._run_half, this_pass, mine, half)
            for thread, mine, half in zip(self._threads, frames, halves, strict=True)
        ]
        interrupt = self._join(this_pass, futures)
        if interrupt is not None and self._abandoned:
            raise interrupt
        errors = [error for future in futures if (error := future.result()) is not None]
        if interrupt is not None:
            raise merge_errors(interrupt, errors)
        if not errors:
            return
        if all(isinstance(error, Exception) for error in errors):
            raise ExceptionGroup(
                f"{len(errors)} of {len(futures)} branches of {self._label} failed",
                [error for error in errors if isinstance(error, Exception)],
            )
        raise merge_errors(errors[0], errors[1:])

    def _run_half(
        self, this_pass: _Pass, frames: Frames, half: Callable[[], object]
    ) -> BaseException | None:
        _current_pass.set(this_pass)
        try:
            half()
        except BaseException as error:  # noqa: BLE001 (raised by the thread that runs the step)
            this_pass.fail(error)
            self._on_failure()
            _current_pass.set(None)  # cleaning up may wait
            return unwind(frames, error)
        finally:
            _current_pass.set(None)
        return None

    def _join(
        self, this_pass: _Pass, futures: Sequence[Future[BaseException | None]]
    ) -> KeyboardInterrupt | None:
        """Wait for all branches; return a first interrupt at the end, and a second one at once."""
        interrupt: KeyboardInterrupt | None = None
        pending = set(futures)
        while pending:
            try:
                _, pending = wait(pending, timeout=self._report_s)
                if pending:
                    _logger.warning(
                        "%s is still waiting for its branches %s",
                        self._label,
                        _unfinished_branches(futures),
                    )
            except KeyboardInterrupt as raised:
                if interrupt is not None:
                    self._abandoned = True
                    return interrupt
                interrupt = raised
                this_pass.fail(raised)
                self._on_failure()
                _logger.warning(
                    "%s was interrupted and is waiting for its branches %s to finish. "
                    "Interrupt it again to leave them running.",
                    self._label,
                    _unfinished_branches(futures),
                )
        return interrupt

    def _unwind_all(self, frames: Sequence[Frames], error: BaseException) -> BaseException:
        if self._abandoned:
            return error
        further: list[BaseException] = []
        for thread, mine in reversed(list(zip(self._threads, frames, strict=True))):
            if mine:
                error = thread.submit(throw_all, mine, error, further).result()
        return merge_errors(error, further)


def _unfinished_branches(futures: Sequence[Future[BaseException | None]]) -> str:
    return ", ".join(str(n) for n, future in enumerate(futures, 1) if not future.done())
