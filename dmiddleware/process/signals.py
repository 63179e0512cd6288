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

__all__ = [
    "ENDING_SIGNALS",
    "HeldSignals",
    "SignalHandler",
    "Terminated",
    "ignore_signal",
    "is_ignored",
    "is_signal_reason",
    "signal_reason",
]

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


def is_signal_reason(reason: str | None) -> bool:
    """Return whether a run was stopped by a signal, which a reason of a peer may report too."""
    return re.search(r"(^|: )received SIG[A-Z0-9]+", reason or "") is not None


class SignalHandler:
    """A signal handler of this process alone: a process forked from it has the one before it.

    Args:
        function: handles a signal, as ``signal.signal`` describes.
    """

    def __init__(self, function: Callable[[int, FrameType | None], None]) -> None:
        self._function = function
        self.replaced: dict[int, Any] = {}

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal."""
        self._function(number, frame)

    def install(self, number: int) -> None:
        """Handle a signal from here on; only in the main thread."""
        self.replaced[number] = signal.signal(number, self)

    def restore(self) -> None:
        """Put back the handlers that were replaced; those of the program since then stay."""
        for number, handler in self.replaced.items():
            if signal.getsignal(number) is self:
                signal.signal(number, handler)


_IGNORE: Final = SignalHandler(lambda number, frame: None)


def ignore_signal(number: int) -> None:
    """Ignore a signal in this process, but not in those that it starts."""
    _IGNORE.install(number)
    _IGNORE.replaced[number] = signal.SIG_DFL


def is_ignored(number: int) -> bool:
    """Whether this process ignores a signal."""
    return signal.getsignal(number) in (signal.SIG_IGN, _IGNORE)


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
        self._handler = SignalHandler(self._handle)

    @property
    def reason(self) -> str | None:
        """Which signal arrived, as a reason to report; None if none did."""
        return None if self._received is None else signal_reason(self._received)

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            caught = _caught()
            for number in ENDING_SIGNALS:
                handler = signal.getsignal(number)
                # None is a handler that was not installed from Python: it could not be restored.
                if handler is None or is_ignored(number):
                    continue
                if handler == signal.SIG_DFL and number in caught:
                    continue
                is_held = number in _ALWAYS_HELD and not self._only_default
                if is_held or handler == _default(number):
                    self._handler.install(number)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        received = self._received
        if received is None:
            self._handler.restore()
        elif self._handler.replaced[received] != _default(received):
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
        self._handler.restore()
        self._received = signal.Signals(number)
        if self._on_signal is not None:
            assert self.reason is not None
            self._on_signal(self.reason)
        if self._may_stop:
            self._raise(self._received)

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
        match = re.search(r"^SigCgt:\s*([0-9a-f]+)", status, re.MULTILINE)
        if match is not None:
            mask = int(match[1], 16)
            return {number for number in range(1, 65) if mask >> (number - 1) & 1}
    return set()


_forking = threading.local()


def _before_fork() -> None:
    _forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING_SIGNALS)


def _after_fork() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _forking.mask)


def _after_fork_in_child() -> None:
    for number in ENDING_SIGNALS:
        handler = signal.getsignal(number)
        while isinstance(handler, SignalHandler):
            handler = handler.replaced[number]
            signal.signal(number, handler)
    _after_fork()


# CPython forgets a signal that reaches a handler of Python in a new child before its first line
# runs, and ``Process.terminate`` and ``join`` would wait forever. So signals stay blocked until the
# child has the handlers that it keeps.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork_in_child
    )
