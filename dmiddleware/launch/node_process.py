"""One process of a run: ``python -m dmiddleware.launch.node_process``, started by ``ditask``.

It reads its :class:`NodeConfig` from standard input, joins the network, runs the user's function
as the node that it is, and tells the launcher how it goes. When standard input ends, the launcher
is dead, and the process ends too.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import io
import logging
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec

from dmiddleware.errors import LaunchError
from dmiddleware.launch.status import NodeConfig, NodeStatus
from dmiddleware.pipeline import CurrentNode, running_as
from dmiddleware.router import NodeOptions, Router
from dmiddleware.router.transport import Transport
from dmiddleware.router.transport.default import SocketTransport
from dmiddleware.router.transport.shared_memory import SharedMemoryTransport

__all__ = ["main"]

_logger = logging.getLogger("ditask")

STATUS_EVERY_S: Final = 1.0
LAST_WORDS_S: Final = 20.0
_PR_SET_PDEATHSIG: Final = 1


def main() -> None:
    """Run one process of a run; the exit code tells whether it went well."""
    config = msgspec.json.decode(_read_line(0), type=NodeConfig)
    # What a program prints is to be seen when it prints it, though this is a pipe.
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)
    # As in a run of one process: what a program logs for its files is not shown here too.
    shown = logging.StreamHandler()
    shown.setLevel(logging.WARNING)
    logging.basicConfig(handlers=[shown], format="%(levelname)s %(name)s: %(message)s")
    sys.exit(_NodeProcess(config).run())


class _NodeProcess:
    """Runs the user's function, and reports."""

    def __init__(self, config: NodeConfig) -> None:
        self._config = config
        self._phase = "starting"
        self._error = ""
        self._done = threading.Event()
        self._status = os.fdopen(config.status_fd, "wb", buffering=0)
        self._router = Router(
            node_id=config.node_id,
            run_id=config.run_id,
            roles=config.roles,
            labels=config.labels,
            listen=config.listen,
            dial=config.dial,
            key=bytes.fromhex(config.key_hex) or None,
            transport=_transport(config),
            options=NodeOptions(),
            expected_peers=config.n_peers,
            start_timeout_s=config.start_timeout_s,
        )
        self._node = CurrentNode(
            router=self._router,
            roles=tuple(config.roles),
            labels=tuple(config.labels),
            stamp=config.stamp,
        )

    def run(self) -> int:
        self._watch_launcher()
        signal.signal(signal.SIGTERM, self._on_signal)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        reporter = threading.Thread(target=self._report_forever, daemon=True)
        reporter.start()
        try:
            with self._router, running_as(self._node):
                function = _find(self._config)
                self._phase = "running"
                _call(function)
            self._phase = "finished"
            return 0 if self._node.stopped_ok else 1
        except BaseException as error:  # noqa: BLE001 (whatever it is, the launcher must hear of it)
            self._phase = "failed"
            self._error = traceback.format_exception_only(error)[0].strip()
            traceback.print_exc()
            return 1
        finally:
            self._done.set()
            reporter.join(STATUS_EVERY_S)
            self._report()

    def _on_signal(self, number: int, frame: object) -> None:
        self._stop(f"received {signal.Signals(number).name}")

    def _stop(self, reason: str, *, ok: bool = True) -> None:
        self._node.stop(reason, ok=ok, only_local=self._config.attached)

    def _watch_launcher(self) -> None:
        _die_with_parent()

        def watch() -> None:
            # Not through sys.stdin, whose lock a thread must not hold when Python ends.
            while os.read(0, 4096):
                pass
            if not self._done.is_set():
                self._stop("the launcher is gone", ok=False)
                if not self._done.wait(LAST_WORDS_S):
                    os._exit(1)

        threading.Thread(target=watch, name="ditask-lifeline", daemon=True).start()

    def _report_forever(self) -> None:
        while not self._done.wait(STATUS_EVERY_S if self._phase == "running" else 0.1):
            self._report()

    def _report(self) -> None:
        progress = self._node.progress()
        status = NodeStatus(
            phase=self._phase,
            address=self._router.address,
            step=progress.step,
            env_step=progress.env_step,
            train_iter=progress.train_iter,
            blocked_s=progress.blocked_s
            + sum(one.blocked_s for one in self._router.traffic().values()),
            peers=len(self._router.peers()),
            reason=self._node.stop_reason or "",
            run_is_over=self._node.ends_run,
            error=self._error,
        )
        with contextlib.suppress(OSError):
            self._status.write(msgspec.json.encode(status) + b"\n")


def _read_line(descriptor: int) -> bytes:
    line = bytearray()
    while (byte := os.read(descriptor, 1)) not in (b"", b"\n"):
        line += byte
    return bytes(line)


def _transport(config: NodeConfig) -> Transport:
    """Return what carries events to and from this node's addresses."""
    if any(address.startswith("redis://") for address in (config.listen, *config.dial)):
        # Not at the top: redis-py need not be installed.
        from dmiddleware.router.transport.redis import RedisTransport

        return RedisTransport(
            username=os.environ.get("DITASK_REDIS_USERNAME"),
            password=os.environ.get("DITASK_REDIS_PASSWORD"),
        )
    sockets = SocketTransport(tls=config.tls)
    if not config.shared_memory:
        return sockets
    return SharedMemoryTransport(sockets, directory=Path(config.shared_memory))


def _find(config: NodeConfig) -> Callable[[], object]:
    """Import the user's function.

    Raises:
        LaunchError: if there is none of this name.
    """
    module_name, _, name = config.main.rpartition(".")
    sys.path.insert(0, str(Path(config.package).resolve()))
    try:
        function = getattr(importlib.import_module(module_name), name, None)
    except ModuleNotFoundError as error:
        if error.name is None or not module_name.startswith(error.name):
            raise
        raise LaunchError(
            f"--main {config.main}: there is no module {error.name} under --package "
            f"{config.package} or on the import path"
        ) from error
    if not callable(function):
        raise LaunchError(f"--main {config.main}: module {module_name} has no function {name!r}")
    return function  # type: ignore[no-any-return]


def _call(function: Callable[[], object]) -> None:
    try:
        function()
    except SystemExit as end:
        # A program may say that it has ended well.
        if end.code not in (None, 0):
            raise


def _die_with_parent() -> None:
    """Have Linux send SIGTERM here when the launcher dies, whatever kills it."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


if __name__ == "__main__":
    main()
