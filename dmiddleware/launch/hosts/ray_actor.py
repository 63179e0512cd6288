"""What runs inside Ray: an actor that is one node of a run.

The launcher asks it for news with a long poll, so that one thread of the launcher can watch
hundreds of nodes, and so that nothing is lost when the launcher is slow.
"""

from __future__ import annotations

import contextlib
import faulthandler
import io
import os
import sys
import threading
import traceback
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from dmiddleware.errors import LaunchError
from dmiddleware.launch.node import JoinedNode
from dmiddleware.launch.node_process import pickled_result
from dmiddleware.launch.plan import NodeConfig
from dmiddleware.launch.ports import free_port
from dmiddleware.launch.status import NodeStatus

__all__ = ["News", "RayNode", "Slot"]

_MOST_BYTES: Final = 1 << 20
_PIECE: Final = 1 << 16
_END_S: Final = 2.0
_END: Final = b"\0the end of the output\0"
"""Marks where the program's output has ended; programs print text."""


class Slot(NamedTuple):
    """Where an actor runs.

    Attributes:
        host: the address of its Ray node.
        port: a free port there; 0: none was asked for.
        pid: its process.
    """

    host: str
    port: int
    pid: int


class News(NamedTuple):
    """The output and the reports of an actor since the last time.

    Attributes:
        output: what it has printed.
        statuses: what the node has reported, oldest first, as JSON.
    """

    output: bytes
    statuses: list[bytes]


class RayNode:
    """One node of a run, as an actor of Ray; its methods may be called at the same time.

    Args:
        umask: the mask for the files of the program; None: that of Ray's processes.
    """

    def __init__(self, umask: int | None = None) -> None:
        if umask is not None:
            os.umask(umask)
        self._changed = threading.Condition()
        self._output = bytearray()
        self._n_lost = 0
        self._statuses: list[bytes] = []
        self._node: JoinedNode | None = None
        self._stop_reason = ""
        self._has_ended = threading.Event()
        self._capture_output()

    def reserve(self, port: int, *, listens: bool) -> Slot:
        """Return where the actor runs.

        Args:
            port: the port that it had before; 0: any.
            listens: whether it needs one.
        """
        import ray

        host = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        free = free_port(host, port) if listens else 0
        return Slot(host, free, os.getpid())

    def run(self, config: bytes) -> tuple[int, bytes]:
        """Run the node; return its exit code, and what its program returned, pickled."""
        decoded = msgspec.json.decode(config, type=NodeConfig)
        _prepare(decoded)
        node = JoinedNode(
            decoded.run,
            decoded.plan.node_id,
            on_status=self._take_status,
            on_failure=_print_traceback,
        )
        with self._changed:
            self._node, reason = node, self._stop_reason
        if reason:
            node.stop(reason)
        try:
            with node:
                result = node.run(decoded.pickled_program or decoded.main, package=decoded.package)
                pickled = pickled_result(result) if decoded.result_file else b""
        except BaseException:  # noqa: BLE001 (the node has reported any kind of failure)
            return 1, b""
        finally:
            self._end_output()
        return 0, pickled

    def news(self, timeout_s: float) -> News:
        """Wait for news, and return them."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._output or self._statuses or self._has_ended.is_set(), timeout_s
            )
            output, self._output = bytes(self._output), bytearray()
            statuses, self._statuses = self._statuses, []
            if self._n_lost:
                output += f"… {self._n_lost:,} bytes of output were dropped …\n".encode()
                self._n_lost = 0
        return News(output, statuses)

    def stop(self, reason: str) -> None:
        """Ask the node to stop, also before it runs."""
        with self._changed:
            self._stop_reason = reason
            node = self._node
        if node is not None:
            node.stop(reason)

    def redial(self, old: str, new: str) -> None:
        """Dial a peer at its new address."""
        if self._node is not None:
            self._node.redial(old, new)

    def dump_stacks(self) -> None:
        """Print what all threads are doing."""
        faulthandler.dump_traceback(file=2, all_threads=True)

    def _take_status(self, status: NodeStatus) -> None:
        with self._changed:
            # Only the newest matters, and the last one of each phase.
            self._statuses = [*self._statuses[-8:], msgspec.json.encode(status)]
            self._changed.notify_all()

    def _capture_output(self) -> None:
        """Keep what the process prints for the launcher; Ray's own log gets it too."""
        read_end, write_end = os.pipe()
        rays = os.dup(1)
        for descriptor in (1, 2):
            os.dup2(write_end, descriptor)
        os.close(write_end)
        sys.stdout, sys.stderr = _line_output(1), _line_output(2)
        faulthandler.enable(file=2)
        threading.Thread(
            target=self._follow_output, args=(read_end, rays), name="ray-output", daemon=True
        ).start()

    def _end_output(self) -> None:
        """Wait until all that the program has printed can be fetched."""
        sys.stdout.flush()
        sys.stderr.flush()
        os.write(1, _END)
        self._has_ended.wait(_END_S)
        with self._changed:
            self._has_ended.set()
            self._changed.notify_all()

    def _follow_output(self, read_end: int, rays: int) -> None:
        while data := os.read(read_end, _PIECE):
            with contextlib.suppress(OSError):
                os.write(rays, data.replace(_END, b""))
            with self._changed:
                self._output += data
                # It may have come in two pieces.
                if (at := self._output.rfind(_END)) >= 0:
                    del self._output[at : at + len(_END)]
                    self._has_ended.set()
                if len(self._output) > _MOST_BYTES:
                    self._n_lost += len(self._output) - _MOST_BYTES
                    del self._output[:-_MOST_BYTES]
                self._changed.notify_all()


def _prepare(config: NodeConfig) -> None:
    """Give the process what one of ditask is started with: variables, arguments, directory."""
    ranks = config.plan.ranks
    os.environ.update(ranks.environment() if ranks is not None else {})
    os.environ.update(config.variables)
    sys.argv[1:] = config.arguments
    if config.directory and Path(config.directory).is_dir():
        # This host shares the file system of the launcher.
        os.chdir(config.directory)
    if config.package not in sys.path:
        sys.path.insert(0, config.package)


def _print_traceback(error: BaseException) -> None:
    if not isinstance(error, LaunchError):
        traceback.print_exception(error)


def _line_output(descriptor: int) -> io.TextIOWrapper:
    raw = os.fdopen(descriptor, "wb", buffering=0, closefd=False)
    return io.TextIOWrapper(raw, encoding="utf-8", errors="backslashreplace", line_buffering=True)
