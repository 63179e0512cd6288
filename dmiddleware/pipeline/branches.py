"""Branches: chains that run side by side, each on a thread of its own."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial

from dmiddleware.pipeline.context import Context
from dmiddleware.pipeline.onion import (
    Chain,
    Frames,
    backward,
    forward,
    merge_errors,
    throw_all,
    unwind,
)

__all__ = ["Branches"]

_logger = logging.getLogger(__name__)


class Branches:
    """Runs chains side by side on the same context.

    A branch has its own thread for all its steps, in both directions, so that what it calls may
    hold on to the thread (a renderer's context, say). All branches are joined before the step goes
    on, and again on the way back, where they run side by side, too.

    When branches fail, the others finish the direction they are in. A failed branch is unwound
    with its own error, then the suspended middleware of the others with the ``ExceptionGroup`` of
    all errors, branch after branch in reverse order, each on its own thread.

    Args:
        chains: the branches.
        label: how messages name them together.
        report_s: after each so many seconds of waiting, the log names who is waited for.
    """

    def __init__(self, chains: Iterable[Chain], label: str, *, report_s: float = 60.0) -> None:
        self._chains = tuple(chains)
        self._label = label
        self._report_s = report_s
        self._threads: tuple[ThreadPoolExecutor, ...] = ()
        self._abandoned = False

    def middleware(self, ctx: Context) -> Generator[None, None, None]:
        """Be one middleware of an outer chain."""
        if not self._threads:
            self._threads = tuple(
                ThreadPoolExecutor(1, thread_name_prefix=f"{self._label} branch {number}")
                for number in range(1, len(self._chains) + 1)
            )
        frames: list[Frames] = [[] for _ in self._chains]
        try:
            self._run_all(
                [
                    partial(_try_forward, chain, ctx, mine)
                    for chain, mine in zip(self._chains, frames, strict=True)
                ]
            )
            if any(frames):
                yield
            self._run_all([partial(_try_backward, mine) for mine in frames])
        except BaseException as error:
            leaving = self._unwind_all(frames, error)
            if leaving is not error:
                raise leaving from leaving.__cause__
            raise

    def close(self) -> None:
        """End the threads, which are idle between steps."""
        for thread in self._threads:
            thread.shutdown(wait=not self._abandoned)
        self._threads = ()

    def _run_all(self, halves: Sequence[Callable[[], BaseException | None]]) -> None:
        futures = [thread.submit(half) for thread, half in zip(self._threads, halves, strict=True)]
        interrupt = self._join(futures)
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

    def _join(self, futures: Sequence[Future[BaseException | None]]) -> KeyboardInterrupt | None:
        """Wait until all are done, and return an interrupt that came; a second one is obeyed."""
        interrupt: KeyboardInterrupt | None = None
        pending = set(futures)
        while pending:
            try:
                _, pending = wait(pending, timeout=self._report_s)
                if pending:
                    _logger.warning(
                        "%s still waits for its branches %s", self._label, _numbers(futures)
                    )
            except KeyboardInterrupt as raised:
                if interrupt is not None:
                    self._abandoned = True
                    return interrupt
                interrupt = raised
                _logger.warning(
                    "%s is interrupted; it waits for its branches %s to finish. "
                    "A second interrupt leaves them alone.",
                    self._label,
                    _numbers(futures),
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


def _try_forward(chain: Chain, ctx: Context, frames: Frames) -> BaseException | None:
    try:
        forward(chain.steps, ctx, frames)
    except BaseException as error:  # noqa: BLE001 (raised by the thread that runs the step)
        return unwind(frames, error)
    return None


def _try_backward(frames: Frames) -> BaseException | None:
    try:
        backward(frames)
    except BaseException as error:  # noqa: BLE001 (raised by the thread that runs the step)
        return unwind(frames, error)
    return None


def _numbers(futures: Sequence[Future[BaseException | None]]) -> str:
    return ", ".join(str(n) for n, future in enumerate(futures, 1) if not future.done())
