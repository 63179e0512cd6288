"""The process of one node: ``python -m dmiddleware.launch.node_process``, started by ``ditask``.

It reads its :class:`~dmiddleware.launch.plan.NodeConfig` from the first line of standard input,
connects to its peers, runs the user's function and reports its status to the launcher. Each further
line of standard input is a reason to stop. When standard input ends, the launcher has died, and the
node stops too.
"""

from __future__ import annotations

import contextlib
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
from dmiddleware.launch.plan import NodeConfig
from dmiddleware.launch.status import NodeStatus
from dmiddleware.pipeline import CurrentNode, running_as
from dmiddleware.router import Router
from dmiddleware.router.transport import Transport
from dmiddleware.router.transport.default import SocketTransport
from dmiddleware.router.transport.shared_memory import SharedMemoryTransport

__all__ = ["main"]

_logger = logging.getLogger("ditask")

STATUS_EVERY_S: Final = 1.0
ORPHAN_EXIT_S: Final = 20.0
"""Seconds that a node may take to finish after its launcher has died."""


def main() -> None:
    """Run one node; the exit code is 0 if it succeeded."""
    launcher = _take_stdin()
    config = msgspec.json.decode(_read_line(launcher), type=NodeConfig)
    # Standard output is a pipe here, but people should see a line as soon as it is printed.
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)
    # As in a run of one process, only warnings reach the terminal.
    handler = logging.StreamHandler()
    handler.setLevel(logging.WARNING)
    logging.basicConfig(handlers=[handler], format="%(levelname)s %(name)s: %(message)s")
    sys.exit(_NodeProcess(config, launcher).run())


class _NodeProcess:
    """Runs the user's function and reports to the launcher."""

    def __init__(self, config: NodeConfig, launcher: int) -> None:
        self._config = config
        self._launcher = launcher
        self._phase = "starting"
        self._error = ""
        self._stop_reason = ""
        self._done = threading.Event()
        self._status = os.fdopen(config.status_fd, "wb", buffering=0)
        plan = config.plan
        self._router = Router(
            node_id=plan.node_id,
            run_id=config.run_id,
            roles=plan.roles,
            labels=plan.labels,
            listen=plan.listen,
            advertise=plan.advertise,
            dial=plan.dial,
            key=bytes.fromhex(config.key_hex) or None,
            transport=_transport(config),
            expected_peers=plan.n_peers,
            start_timeout_s=config.start_timeout_s,
        )
        self._node = CurrentNode(
            router=self._router,
            roles=plan.roles,
            labels=plan.labels,
            stamp=config.stamp,
            run_roles=plan.run_roles,
        )

    def run(self) -> int:
        threading.Thread(target=self._follow_launcher, name="ditask-launcher", daemon=True).start()
        signal.signal(signal.SIGTERM, self._on_signal)
        # Ctrl-C is for the launcher, which then stops all nodes.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        reporter = threading.Thread(target=self._report_forever, daemon=True)
        reporter.start()
        try:
            with self._router, running_as(self._node):
                function = _find(self._config)
                if not self._stop_reason:
                    self._phase = "running"
                    _call(function)
                if self._node.interrupted:
                    self._router.suspend()
            self._phase = "finished"
            return 0 if self._node.stopped_ok else 1
        except BaseException as error:  # noqa: BLE001 (the launcher reports any kind of failure)
            self._phase = "failed"
            self._error = _summarize(error)
            if not isinstance(error, LaunchError):
                _print_traceback(error)
            return 1
        finally:
            self._done.set()
            reporter.join(STATUS_EVERY_S)
            self._report()

    def _on_signal(self, number: int, frame: object) -> None:
        self._stop(f"received {signal.Signals(number).name}", interrupted=True)

    def _stop(self, reason: str, *, ok: bool = True, interrupted: bool = False) -> None:
        self._stop_reason = self._stop_reason or reason
        self._node.stop(reason, ok=ok, only_local=self._config.attached, interrupted=interrupted)

    def _follow_launcher(self) -> None:
        """Stop when the launcher asks for it, or when it has died."""
        while line := _read_line(self._launcher):
            self._stop(msgspec.json.decode(line, type=str))
        if not self._done.is_set():
            self._stop("the launcher has died", ok=False)
            if not self._done.wait(ORPHAN_EXIT_S):
                os._exit(1)

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
            reason=self._node.stop_reason or self._stop_reason,
            run_is_over=self._node.ends_run,
            error=self._error,
        )
        with contextlib.suppress(OSError):
            self._status.write(msgspec.json.encode(status) + b"\n")


def _summarize(error: BaseException) -> str:
    """Return the error's type and the first line of its message."""
    first, *others = str(error).splitlines() or [""]
    if first.endswith(":") and others:
        first = f"{first} {others[0].strip()}"
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


def _print_traceback(error: BaseException) -> None:
    """Print the traceback from the user's function on."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
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


def _transport(config: NodeConfig) -> Transport:
    """Return the transport for this node's addresses."""
    addresses = (config.plan.listen, *config.plan.dial)
    if any(address.startswith("redis://") for address in addresses):
        # Imported here because redis-py is optional.
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
        LaunchError: if it does not exist.
    """
    module_name, _, name = config.main.rpartition(".")
    sys.path.insert(0, str(Path(config.package).resolve()))
    try:
        function = getattr(importlib.import_module(module_name), name, None)
    except ModuleNotFoundError as error:
        if error.name is None or not module_name.startswith(error.name):
            raise
        raise LaunchError(
            f"--main {config.main}: found no module {error.name} in --package "
            f"{config.package} or on the import path"
        ) from None
    if not callable(function):
        raise LaunchError(f"--main {config.main}: module {module_name} has no function {name!r}")
    return function  # type: ignore[no-any-return]


def _call(function: Callable[[], object]) -> None:
    try:
        function()
    except SystemExit as end:
        # sys.exit(0) is a normal end of a program.
        if end.code not in (None, 0):
            raise


if __name__ == "__main__":
    main()
