"""Ctrl-C and SIGTERM, held back until the program is in a state that can be saved."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any, Final, Self

__all__ = ["HeldSignals", "Terminated"]

_DEFAULTS: Final = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}


class Terminated(BaseException):
    """SIGTERM arrived; raised where the work may stop."""


class HeldSignals:
    """Hold back the first SIGINT (Ctrl-C) or SIGTERM while something must not be interrupted.

    The signal is remembered, and raised in the next :meth:`interruptible` block (or in the current
    one): SIGINT as ``KeyboardInterrupt``, SIGTERM as :class:`Terminated`. A second signal has its
    usual effect at once.

    At the end of the ``with`` block the signal has its effect: a handler that the program has
    installed receives it. Otherwise SIGINT raises ``KeyboardInterrupt`` and SIGTERM raises
    ``SystemExit(143)``, which lets the blocks outside close what they have opened; an error that
    leaves the block is not replaced.

    A signal that the process ignores stays ignored. Outside the main thread, where Python
    handles no signals, this does nothing.

    Args:
        on_signal: called by the first signal, in the main thread between two bytecodes, with the
            reason to report, such as ``"received SIGTERM"``.
        only_default: hold only signals that have Python's default handlers; a signal for which the
            program has installed a handler goes to it at once.
    """

    def __init__(
        self, on_signal: Callable[[str], None] | None = None, *, only_default: bool = False
    ) -> None:
        self._on_signal = on_signal
        self._only_default = only_default
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
            for number, default in _DEFAULTS.items():
                handler = signal.getsignal(number)
                # None is a handler that was not installed from Python: it could not be restored.
                if handler in (signal.SIG_IGN, None):
                    continue
                if handler == default or not self._only_default:
                    self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        received = self._received
        if received is None:
            self._restore()
        elif self._previous[received] != _DEFAULTS[received]:
            signal.raise_signal(received)
        elif error is None or isinstance(error, Terminated):
            if received is signal.SIGINT:
                raise KeyboardInterrupt
            raise SystemExit(128 + received) from None

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
        self._restore()
        self._received = signal.Signals(number)
        if self._on_signal is not None:
            assert self.reason is not None
            self._on_signal(self.reason)
        if self._may_stop:
            self._raise(self._received)

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _raise(self, received: signal.Signals) -> None:
        self._may_stop = False
        if received is signal.SIGINT:
            raise KeyboardInterrupt
        raise Terminated(self.reason)
