"""The process of one run of a sweep: ``ditask``, which ends with the sweep and notes its end.

It reads what to run from the first line of standard input. When standard input ends, the sweep has
ended, and the run is stopped in order. Why a run failed goes to the sweep through a pipe, because
the disk that has its output may be full.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
import threading
from pathlib import Path
from typing import IO

import msgspec

from dmiddleware.launch.cli import ditask
from dmiddleware.launch.output import SteadyStream
from dmiddleware.launch.run_process import end_with_caller
from dmiddleware.sweep.sweep_plan import TAIL, reason_in, write_file

__all__ = ["SweptOrder", "main"]

_FIRST_SIGNAL = 128


class SweptOrder(msgspec.Struct, frozen=True):
    """What to run.

    Attributes:
        words: the arguments of ``ditask``.
        ended: the file for the exit code.
        reason_fd: the descriptor to write to why the run has failed.
    """

    words: tuple[str, ...]
    ended: str
    reason_fd: int


class _KeepingEnd(io.TextIOBase):
    """Writes to a stream, whatever happens to it, and keeps the end of the text.

    It has no descriptor, so that nothing writes past it.
    """

    def __init__(self, stream: IO[str]) -> None:
        self._stream = SteadyStream(stream)
        self.end = ""

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._stream.encoding

    def write(self, text: str) -> int:
        self.end = (self.end + text)[-TAIL:]
        return self._stream.write(text)


def main() -> None:
    """Run the order; the exit code is that of ``ditask``."""
    order = msgspec.json.decode(sys.stdin.buffer.readline(), type=SweptOrder)
    os.set_inheritable(order.reason_fd, False)
    threading.Thread(target=end_with_caller, name="sweep-caller", daemon=True).start()
    output = _KeepingEnd(sys.stdout)
    sys.stdout = sys.stderr = output  # both are the file of the run
    code = 0
    try:
        ditask.main(list(order.words), prog_name="ditask")
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    reason = reason_in(output.end) if code else ""
    if code <= _FIRST_SIGNAL:  # what a signal has ended can continue
        try:
            write_file(Path(order.ended), str(code).encode())
        except OSError as error:
            reason = reason or f"its end cannot be noted in {order.ended} ({error.strerror})"
    with contextlib.suppress(OSError):  # the sweep may have been killed
        os.write(order.reason_fd, reason.encode(errors="replace"))
    sys.exit(code)
