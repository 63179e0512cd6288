"""SIGTERM, held back until the work in hand is in a state that can be saved."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any, Self

__all__ = ["SigtermGuard", "Terminated"]


class Terminated(BaseException):
    """SIGTERM came; raised where the work may stop."""


class SigtermGuard:
    """Turns SIGTERM into :class:`Terminated`, raised only where the work may stop.

    An update of parameters is never cut in two: the signal is remembered and raised at the next
    :meth:`interruptible` part (which it interrupts, if it is there already). On leaving, the
    signal goes to whoever handled it before. Outside of the main thread, where Python does not
    handle signals, the guard does nothing.
    """

    def __init__(self) -> None:
        self._came = False
        self._may_stop = False
        self._before: Any = None
        self._installed = False

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGTERM, self._on_signal)
            self._installed = True
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if not self._installed:
            return
        self._installed = False
        # None stands for a handler that was not set from Python; it cannot be put back.
        signal.signal(signal.SIGTERM, self._before or signal.SIG_DFL)
        if self._came:
            signal.raise_signal(signal.SIGTERM)

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Mark a part that SIGTERM may interrupt.

        Raises:
            Terminated: if the signal came before or comes now.
        """
        self._may_stop = True
        try:
            if self._came:
                raise Terminated("SIGTERM")
            yield
        finally:
            self._may_stop = False

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._came = True
        if self._may_stop:
            self._may_stop = False
            raise Terminated("SIGTERM")
