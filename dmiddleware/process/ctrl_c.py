"""Ctrl-C ends a command with one line and exit code 130, and not with a traceback."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Final, NoReturn

from dmiddleware.process.signals import signal_reason

__all__ = ["exit_after_ctrl_c", "exit_at_ctrl_c"]

_CODE: Final = 128 + signal.SIGINT


@contextlib.contextmanager
def exit_after_ctrl_c() -> Iterator[None]:
    """Let a command that Ctrl-C has interrupted clean up and exit."""
    try:
        yield
    except KeyboardInterrupt:
        sys.stderr.write(_line())
        raise SystemExit(_CODE) from None


@contextlib.contextmanager
def exit_at_ctrl_c() -> Iterator[None]:
    """Let Ctrl-C end the process at once, while it only imports modules.

    They may catch ``KeyboardInterrupt``, or be interrupted where Python ignores errors, and then
    the program would start. A handler that the program has installed stays.
    """
    in_main = threading.current_thread() is threading.main_thread()
    if not in_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, _exit)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _exit(number: int, frame: FrameType | None) -> NoReturn:
    with contextlib.suppress(OSError):
        os.write(2, _line().encode())
    os._exit(_CODE)


def _line() -> str:
    return f"stopped: {signal_reason(signal.SIGINT)}\n"
