"""Signals that end a process, held back until the program is in a state that can be saved."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Final, Self

__all__ = ["ENDING_SIGNALS", "HeldSignals", "Terminated", "signal_reason"]

ENDING_SIGNALS: Final = tuple(
    getattr(signal, name)
    for name in (
        "SIGINT",
        "SIGTERM",
        "SIGHUP",
        "SIGQUIT",
        "SIGUSR1",
        "SIGUSR2",
        "SIGALRM",
        "SIGXCPU",
        "SIGVTALRM",
        "SIGPROF",
        "SIGIO",
        "SIGPWR",
    )
    if hasattr(signal, name)
)
"""The signals that end a process without a handler, other than those of a crash."""

_ALWAYS_HELD: Final = (signal.SIGINT, signal.SIGTERM)
_DEFAULTS: Final = {signal.SIGINT: signal.default_int_handler}
_CAUSES: Final = {
    "SIGINT": " (Ctrl-C)",
    "SIGHUP": " (the terminal was closed)",
    "SIGXCPU": " (the limit of CPU time)",
}


def signal_reason(number: int) -> str:
    """Return a signal as a reason to report, such as ``"received SIGTERM"``."""
    name = signal.Signals(number).name
    return f"received {name}{_CAUSES.get(name, '')}"


class Terminated(BaseException):
    """A signal such as SIGTERM arrived; raised where the work may stop."""


class HeldSignals:
    """Hold back the first signal that would end the process while it must not be interrupted.

    These are SIGINT (Ctrl-C), SIGTERM, and all others of :data:`ENDING_SIGNALS`. The signal is
    remembered, and raised in the next :meth:`interruptible` block (or in the current one): SIGINT
    as ``KeyboardInterrupt``, others as :class:`Terminated`. A second signal has its usual effect at
    once.

    At the end of the ``with`` block the signal has its effect: a handler that the program has
    installed receives it. Otherwise SIGINT raises ``KeyboardInterrupt`` and others raise
    ``SystemExit(128 + number)``, which lets the blocks outside close what they have opened; an
    error that leaves the block is not replaced.

    A signal that the process ignores stays ignored, and so does one with a handler that was not
    installed by Python's ``signal``, such as that of ``faulthandler.register``. Forked processes do
    not inherit this. Outside the main thread, where Python handles no signals, this does nothing.

    Args:
        on_signal: called by the first signal, in the main thread between two bytecodes, with the
            reason to report, such as ``"received SIGTERM"``.
        only_default: hold only signals that have Python's default handlers; a signal for which the
            program has installed a handler goes to it at once. Other signals than SIGINT and
            SIGTERM always do.
    """

    def __init__(
        self, on_signal: Callable[[str], None] | None = None, *, only_default: bool = False
    ) -> None:
        self._on_signal = on_signal
        self._only_default = only_default
        self._received: signal.Signals | None = None
        self._may_stop = False
        self._pid = os.getpid()
        self._previous: dict[signal.Signals, Any] = {}

    @property
    def reason(self) -> str | None:
        """Which signal arrived, as a reason to report; None if none did."""
        return None if self._received is None else signal_reason(self._received)

    def __enter__(self) -> Self:
        self._pid = os.getpid()
        if threading.current_thread() is threading.main_thread():
            caught = _caught()
            for number in ENDING_SIGNALS:
                handler = signal.getsignal(number)
                # None is a handler that was not installed from Python: it could not be restored.
                if handler in (signal.SIG_IGN, None):
                    continue
                if handler == signal.SIG_DFL and number in caught:
                    continue
                held = number in _ALWAYS_HELD and not self._only_default
                if held or handler == _default(number):
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
        elif self._previous[received] != _default(received):
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
            Terminated: if another signal arrived before or arrives now.
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
        if os.getpid() != self._pid:
            signal.raise_signal(number)
            return
        self._received = signal.Signals(number)
        if self._on_signal is not None:
            assert self.reason is not None
            self._on_signal(self.reason)
        if self._may_stop:
            self._raise(self._received)

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            # The program may have installed a handler meanwhile.
            if signal.getsignal(number) == self._handle:
                signal.signal(number, handler)

    def _raise(self, received: signal.Signals) -> None:
        self._may_stop = False
        if received is signal.SIGINT:
            raise KeyboardInterrupt
        raise Terminated(self.reason)


def _default(number: int) -> Any:
    return _DEFAULTS.get(signal.Signals(number), signal.SIG_DFL)


def _caught() -> set[int]:
    """Return the signals for which the process has a handler; empty where that is not known.

    Python knows only of those that were installed by its module ``signal``.
    """
    with contextlib.suppress(OSError):
        status = Path("/proc/self/status").read_text("utf-8", "replace")
        found = re.search(r"^SigCgt:\s*([0-9a-f]+)", status, re.MULTILINE)
        if found is not None:
            mask = int(found[1], 16)
            return {number for number in range(1, 65) if mask >> (number - 1) & 1}
    return set()
