"""The process of one run of a sweep: ``ditask``, which ends with the sweep and notes its end.

It reads what to run from the first line of standard input. When standard input ends, the sweep has
ended, and the run is stopped in order.
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import msgspec

from dmiddleware.launch.cli import ditask
from dmiddleware.launch.run_process import end_with_caller
from dmiddleware.sweep.sweep_plan import write_file

__all__ = ["SweptOrder", "main"]

_FIRST_SIGNAL = 128


class SweptOrder(msgspec.Struct, frozen=True):
    """What to run.

    Attributes:
        words: the arguments of ``ditask``.
        ended: the file for the exit code.
    """

    words: tuple[str, ...]
    ended: str


def main() -> None:
    """Run the order; the exit code is that of ``ditask``."""
    order = msgspec.json.decode(sys.stdin.buffer.readline(), type=SweptOrder)
    threading.Thread(target=end_with_caller, name="sweep-caller", daemon=True).start()
    code = 0
    try:
        ditask.main(list(order.words), prog_name="ditask")
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    if code <= _FIRST_SIGNAL:  # what a signal has ended can continue
        write_file(Path(order.ended), str(code).encode())
    sys.exit(code)
