"""The process of one node, started by ``ditask`` with the arguments of the program.

It reads its :class:`~dmiddleware.launch.plan.NodeConfig` from the first line of standard input,
joins the run, and reports its status to the launcher. Each further line of standard input is a
reason to stop. When standard input ends, the launcher has died, and the node stops too.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import io
import logging
import os
import signal
import sys
import threading
import traceback
from pathlib import Path
from typing import Any, Final

import msgspec

from dmiddleware.errors import LaunchError
from dmiddleware.launch.leftovers import end_processes
from dmiddleware.launch.node import NO_TERMINAL, JoinedNode
from dmiddleware.launch.plan import NodeConfig
from dmiddleware.launch.status import NodeStatus
from dmiddleware.pipeline.current_node import NODE_VARIABLE
from dmiddleware.process.terminal import needs_terminal

__all__ = ["main", "pickled_result"]

_logger = logging.getLogger("ditask")

_CALLERS: Final = (
    "__main__",
    "dmiddleware.launch.node",
    "dmiddleware.launch.node_process",
    "dmiddleware.launch.main_function",
    "importlib",
    "importlib._bootstrap",
    "importlib._bootstrap_external",
)


def main() -> None:
    """Run one node; the exit code is 0 if it succeeded."""
    if sys.path[0] == "":
        sys.path[0] = str(Path.cwd())  # the program may change the directory
    launcher = _take_stdin()
    config = msgspec.json.decode(_read_line(launcher), type=NodeConfig)
    with contextlib.suppress(OSError):  # what top and ps show; only on Linux
        Path("/proc/self/comm").write_text(f"ditask node {config.plan.node_id}")
    # Runs after all that the program registers: some of its processes may still have work to do.
    atexit.register(_end_children, os.getpid(), config.mark)
    sys.stdout, sys.stderr = _line_output(1, config.log), _line_output(2, config.log)
    # Its log, and the report of the launcher, then say where it crashed.
    faulthandler.enable(file=2)
    # The launcher sends it to a node that hangs, to see where.
    faulthandler.register(signal.SIGQUIT, file=2, all_threads=True)
    # As in a run of one process, only warnings reach the terminal.
    handler = logging.StreamHandler()
    handler.setLevel(logging.WARNING)
    logging.basicConfig(handlers=[handler], format="%(levelname)s %(name)s: %(message)s")
    # For threads that outlive the program too.
    os.environ[NODE_VARIABLE] = f"{os.getpid()}:{config.plan.node_id}"
    sys.exit(_run(config, launcher))


def _run(config: NodeConfig, launcher: int) -> int:
    """Run the program and report to the launcher; return the exit code."""
    with os.fdopen(config.status_fd, "wb", buffering=0) as pipe:

        def report(status: NodeStatus) -> None:
            with contextlib.suppress(OSError):
                pipe.write(msgspec.json.encode(status) + b"\n")

        node = JoinedNode(
            config.run, config.plan.node_id, on_status=report, on_failure=_print_traceback
        )
        threading.Thread(
            target=_follow_launcher, args=(node, config, launcher), name="ditask-launcher",
            daemon=True,
        ).start()  # fmt: skip
        try:
            with node:
                result = node.run(config.pickled_program or config.main, package=config.package)
                if config.result_file:
                    Path(config.result_file).write_bytes(pickled_result(result))
        except BaseException:  # noqa: BLE001 (the node has reported any kind of failure)
            return 128 + node.ended_by if node.ended_by else 1
        return 0


def pickled_result(result: Any) -> bytes:
    """Return what a program has returned, pickled; empty, with a warning: that is not possible."""
    try:
        import cloudpickle

        return bytes(cloudpickle.dumps(result))
    except Exception as error:  # noqa: BLE001 (objects of the program may raise anything)
        _logger.warning("cannot send what the program returned to the launcher: %r", error)
        return b""


def _follow_launcher(node: JoinedNode, config: NodeConfig, launcher: int) -> None:
    """Stop when the launcher asks for it, or when it has died."""
    while line := _read_line(launcher):
        node.stop(msgspec.json.decode(line, type=str))
    if not node.done.is_set():
        node.stop("the launcher has died", ok=False)
        if not node.done.wait(config.kill_after_s):
            _end_children(os.getpid(), config.mark)
            os._exit(1)


class _Output(io.FileIO):
    """Standard output, which continues in the log file when the launcher no longer reads it."""

    def __init__(self, descriptor: int, log: str) -> None:
        super().__init__(descriptor, "wb", closefd=False)
        self._log = log

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data) or 0
        except BrokenPipeError:
            try:
                file = os.open(self._log or os.devnull, os.O_WRONLY | os.O_APPEND)
            except OSError:
                file = os.open(os.devnull, os.O_WRONLY)
            os.dup2(file, self.fileno())
            os.close(file)
            return super().write(data) or 0


def _line_output(descriptor: int, log: str) -> io.TextIOWrapper:
    """Return a text stream that writes each line at once: people should see it."""
    raw = io.BufferedWriter(_Output(descriptor, log))
    name = (sys.stdout if descriptor == 1 else sys.stderr).encoding
    return io.TextIOWrapper(raw, encoding=name, errors="backslashreplace", line_buffering=True)


def _end_children(node: int, mark: str) -> None:
    """End the processes that the node has started; a fork of the node ends none."""
    if os.getpid() == node:
        n_left = end_processes((mark,) if mark else (), below=(node,), helpers=False)
        if n_left:
            _logger.warning("ended %d processes that the program had left behind", n_left)


def _print_traceback(error: BaseException) -> None:
    """Print the traceback from the user's function on, before the node leaves its peers."""
    if isinstance(error, LaunchError):
        return  # the launcher shows its message
    if needs_terminal(error):
        error.add_note(NO_TERMINAL)
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_globals["__name__"] in _CALLERS:
        frames = frames.tb_next
    traceback.print_exception(error.with_traceback(frames))


def _take_stdin() -> int:
    """Return a private descriptor of standard input, and give the program an empty one.

    Otherwise the program, or a process that it starts, could read what the launcher sends.
    """
    launcher = os.dup(0)
    with Path(os.devnull).open("rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    return launcher


def _read_line(descriptor: int) -> bytes:
    line = bytearray()
    while (byte := os.read(descriptor, 1)) not in (b"", b"\n"):
        line += byte
    return bytes(line)
