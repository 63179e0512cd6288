"""Ctrl-C and SIGTERM, held back until the program is in a state that can be saved."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any, Self

__all__ = ["HeldSignals", "Terminated"]


class Terminated(BaseException):
    """SIGTERM arrived; raised where the work may stop."""


class HeldSignals:
    """Hold SIGINT (Ctrl-C) and SIGTERM back while something runs that must not be cut in two.

    A signal is remembered, and raised in the next :meth:`interruptible` block (or in the current
    one): SIGINT as ``KeyboardInterrupt``, SIGTERM as :class:`Terminated`. At the end of the
    ``with`` block the previous handlers are restored, and the signal is sent again, to them. A
    second Ctrl-C raises ``KeyboardInterrupt`` at once.

    A signal that the process ignores stays ignored. In other threads than the main thread, where
    Python handles no signals, nothing happens.

    Args:
        on_signal: called by the first signal, in the main thread between two bytecodes, with the
            reason to report, such as ``"received SIGTERM"``.
    """

    def __init__(self, on_signal: Callable[[str], None] | None = None) -> None:
        self._on_signal = on_signal
        self._received: signal.Signals | None = None
        self._may_stop = False
        self._previous: dict[signal.Signals, Any] = {}

    @property
    def reason(self) -> str | None:
        """Which signal arrived, as a reason to report; None if none did."""
        if self._received is None:
            return None
        name = "SIGINT (Ctrl-C)" if self._received is signal.SIGINT else self._received.name
        return f"received {name}"

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                # None is a handler that was not installed from Python: it could not be restored.
                if signal.getsignal(number) not in (signal.SIG_IGN, None):
                    self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        previous, self._previous = self._previous, {}
        for number, handler in previous.items():
            signal.signal(number, handler)
        if self._received is None:
            return
        raises = previous[self._received] is signal.default_int_handler
        if not (raises and isinstance(error, KeyboardInterrupt)):
            signal.raise_signal(self._received)

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Mark a block that a signal may interrupt.

        Raises:
            KeyboardInterrupt: if SIGINT arrived before or arrives now.
            Terminated: if SIGTERM arrived before or arrives now.
        """
        self._may_stop = True
        try:
            if self._received is not None:
                self._raise(self._received)
            yield
        finally:
            self._may_stop = False

    def _handle(self, number: int, frame: FrameType | None) -> None:
        is_first = self._received is None
        if not is_first and number == signal.SIGINT:
            raise KeyboardInterrupt
        if is_first:
            self._received = signal.Signals(number)
            if self._on_signal is not None:
                assert self.reason is not None
                self._on_signal(self.reason)
        if self._may_stop and self._received is not None:
            self._raise(self._received)

    def _raise(self, received: signal.Signals) -> None:
        self._may_stop = False
        if received is signal.SIGINT:
            raise KeyboardInterrupt
        raise Terminated(self.reason)
