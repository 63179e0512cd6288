"""The process that runs a run for :func:`~dmiddleware.launch.launch`.

It reads what to run from standard input, and writes the status of the nodes to a pipe. It has the
signals, the terminal and the children of ``ditask``, which the program that calls ``launch`` keeps
for itself. When standard input ends, that program has ended, and the run is stopped.
"""

from __future__ import annotations

import contextlib
import os
import signal
import struct
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Final

import cloudpickle
import msgspec

from dmiddleware.errors import DMiddlewareError
from dmiddleware.launch.child import Child
from dmiddleware.launch.launcher import Program, execute
from dmiddleware.launch.options import LaunchOptions
from dmiddleware.launch.status import NodeStatus

__all__ = ["Order", "RunReport", "end_with_caller", "main", "read_order", "write_order"]

_REPORT_EVERY_S: Final = 0.5


class Order(msgspec.Struct, frozen=True):
    """What to run.

    Attributes:
        options: the options, as cloudpickle has saved them.
        program: the function, as cloudpickle has saved it; empty: it is imported by its name.
        imports: what the nodes will import, if it is not imported by its name.
        results: the folder for what the program returns in each node.
        status_fd: the descriptor to write each :class:`RunReport` to.
    """

    options: bytes
    program: bytes
    imports: list[str]
    results: str
    status_fd: int


class RunReport(msgspec.Struct, frozen=True):
    """The state of a run.

    Attributes:
        nodes: the status of each node, by its id.
        hub: the first learner, or the first node if none learns.
        error: why the run could not be started or has failed; empty: it has not.
    """

    nodes: dict[int, NodeStatus] = {}
    hub: int = 0
    error: str = ""


def write_order(stream: IO[bytes], order: Order) -> None:
    """Write an order in front of what follows."""
    data = msgspec.msgpack.encode(order)
    stream.write(struct.pack(">Q", len(data)) + data)
    stream.flush()


def read_order(stream: IO[bytes]) -> Order:
    """Read what :func:`write_order` wrote."""
    (size,) = struct.unpack(">Q", stream.read(8))
    return msgspec.msgpack.decode(stream.read(size), type=Order)


def main() -> None:
    """Run the order; the exit code is that of ``ditask``."""
    order = read_order(sys.stdin.buffer)
    options: LaunchOptions = cloudpickle.loads(order.options)
    threading.Thread(target=end_with_caller, name="launch-caller", daemon=True).start()
    with os.fdopen(order.status_fd, "wb", buffering=0) as pipe:
        display = _Reports(pipe)
        program = Program(order.program, order.imports, Path(order.results))
        try:
            code = execute(options, os.environ, program=program, display=display)
        except DMiddlewareError as error:
            display.fail(str(error))
            code = 1
    sys.exit(code)


def end_with_caller() -> None:
    """Stop the run when the program that has started it has ended, and with it standard input."""
    with contextlib.suppress(OSError):
        while os.read(0, 1):
            pass
    os.kill(os.getpid(), signal.SIGTERM)


class _Reports:
    """Writes the status of the nodes to a pipe, one line of JSON at a time."""

    def __init__(self, pipe: IO[bytes]) -> None:
        self._pipe = pipe
        self._next = 0.0
        self._report = RunReport()

    def line(self, child: Child, text: str) -> None:
        pass

    def note(self, text: str) -> None:
        if text.startswith("the run failed: "):
            self.fail(text)

    def update(self, children: Sequence[Child]) -> None:
        nodes = {child.plan.node_id: child.status for child in children}
        hub = next((child for child in children if child.plan.leads_run), children[0])
        self._report = RunReport(nodes, hub.plan.node_id)
        has_ended = not any(child.alive for child in children)
        if time.monotonic() >= self._next or has_ended:
            self._next = time.monotonic() + _REPORT_EVERY_S
            self._write(self._report)

    def fail(self, error: str) -> None:
        """Report why the run could not be started, or has failed."""
        self._write(msgspec.structs.replace(self._report, error=error))

    def _write(self, report: RunReport) -> None:
        with contextlib.suppress(OSError):
            self._pipe.write(msgspec.json.encode(report) + b"\n")
