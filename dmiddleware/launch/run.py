"""Start a run from Python, and hold it: what ``ditask`` is on the command line."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import cloudpickle
import msgspec

from dmiddleware.errors import LaunchError, WaitTimeout
from dmiddleware.launch.early_imports import early_modules
from dmiddleware.launch.options import LaunchOptions
from dmiddleware.launch.run_process import Order, RunReport, write_order
from dmiddleware.launch.status import NodeStatus

__all__ = ["Run", "launch"]

_START: Final = "from dmiddleware.launch.run_process import main; main()"
_NODE_STOPS_S: Final = 10.0


def launch(
    main: str | Callable[[], Any],
    *,
    roles: Mapping[str, int] | None = None,
    show: bool = True,
    **options: Any,
) -> Run:
    """Start a program in several processes, and return at once.

    ``main`` runs in each of them, without arguments; use ``functools.partial`` to pass some. A
    function of the program that calls this, or of a notebook, is sent to them as it is, so that
    program needs no ``if __name__ == "__main__"``. A function of another module is imported there.

    Args:
        main: the program, or its name, ``package.module.function``.
        roles: number of processes per role, such as ``{"learner": 1, "collector": 8}``.
        show: whether to print what ``ditask`` would print.
        **options: the options of ``ditask`` by their names in Python, such as
            ``parallel_workers=4``; see :class:`LaunchOptions`.

    Returns:
        The run. Leaving its ``with`` block stops it, and so does the end of this program.

    Raises:
        LaunchError: for an option that does not exist or has an invalid value, or a function that
            cannot be sent.

    Example:
        >>> from dmiddleware.launch import launch
        >>> with launch(lambda: 6 * 7, show=False) as run:
        ...     run.result()
        42
    """
    name = main if isinstance(main, str) else "program.main"
    chosen = {"roles": tuple((roles or {}).items()), "package": Path(sys.path[0] or "."), **options}
    return Run(
        LaunchOptions(main=name, **chosen),
        b"" if isinstance(main, str) else _pickled(main),
        show=show,
    )


class Run:
    """A run of several processes that this program has started; see :func:`launch`."""

    def __init__(self, options: LaunchOptions, program: bytes, *, show: bool) -> None:
        self._report = RunReport()
        self._show = show
        self._is_stopped = False
        self._ends_with_block = False
        self._result: bytes | None = None
        self._exit = contextlib.ExitStack()
        results = tempfile.TemporaryDirectory(prefix="results-of-ditask-")
        self._results = Path(self._exit.enter_context(results))
        read_end, write_end = os.pipe()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _START],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=(write_end,),
                start_new_session=True,
            )
        except OSError as error:
            os.close(read_end)
            self._exit.close()
            raise LaunchError(f"cannot start the launcher's process: {error}") from error
        finally:
            os.close(write_end)
        self._threads = [
            threading.Thread(target=follow, daemon=True, name=f"launch-{topic}")
            for topic, follow in (
                ("status", lambda: self._follow_status(read_end)),
                ("output", self._follow_output),
            )
        ]
        for thread in self._threads:
            thread.start()
        assert self._process.stdin is not None
        order = Order(
            options=cloudpickle.dumps(options),
            program=program,
            imports=early_modules(sys.modules),
            results=str(self._results),
            status_fd=write_end,
        )
        with contextlib.suppress(BrokenPipeError):
            write_order(self._process.stdin, order)

    def __enter__(self) -> Self:
        self._ends_with_block = True
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    @property
    def running(self) -> bool:
        """Whether the run has not ended."""
        return self._process.poll() is None

    def status(self) -> dict[int, NodeStatus]:
        """Return the newest status of each node, by its id; empty while they start."""
        return dict(self._report.nodes)

    def wait(self, timeout_s: float | None = None) -> int:
        """Wait until the run has ended, and return its exit code, which is that of ``ditask``.

        Args:
            timeout_s: how long to wait; None: as long as it takes.

        Raises:
            WaitTimeout: if it is still running then; it continues.
        """
        try:
            code = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise WaitTimeout(
                f"the run is still running after {timeout_s:g} s; {self._describe()}"
            ) from None
        except KeyboardInterrupt:
            if not self._ends_with_block:
                self._say(
                    "the run continues: wait() or result() waits for it again, stop() stops it; it "
                    "also stops when this program ends"
                )
            raise
        for thread in self._threads:
            thread.join()
        file = self._results / f"{self._report.hub}.pickle"
        if self._result is None and file.exists():
            self._result = file.read_bytes() or None
        self._exit.close()
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()
        return code

    def result(self, timeout_s: float | None = None) -> Any:
        """Wait until the run has ended, and return what the program returned in its first learner.

        Without a learner, it is what the first node returned.

        Args:
            timeout_s: as in :meth:`wait`.

        Raises:
            WaitTimeout: as in :meth:`wait`.
            LaunchError: if the run failed or was stopped, with the first cause.
        """
        code = self.wait(timeout_s)
        if code:
            reason = "it was stopped" if self._is_stopped else f"exit code {code}"
            raise LaunchError(self._report.error or f"the run gave no result: {reason}")
        if self._result is None:
            raise LaunchError("the run gave no result: what the program returned cannot be pickled")
        return cloudpickle.loads(self._result)

    def stop(self, timeout_s: float = 30.0) -> int:
        """Stop the run in order, as Ctrl-C stops ``ditask``, and return its exit code.

        A run that has ended is left as it is. May be called twice.

        Args:
            timeout_s: how long its processes may take; then they are killed.
        """
        if self.running:
            self._is_stopped = True
            for wait_s in (timeout_s, _NODE_STOPS_S):  # the second signal kills the nodes
                self._process.send_signal(signal.SIGINT)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(wait_s)
                    break
            else:
                self._process.kill()
        return self.wait()

    def _say(self, text: str) -> None:
        if self._show:
            sys.stdout.write(f"[ditask] {text}\n")
            sys.stdout.flush()

    def _describe(self) -> str:
        nodes = [
            f"node {node_id}: {status.phase}" for node_id, status in self._report.nodes.items()
        ]
        return ", ".join(nodes) or "its processes start"

    def _follow_status(self, descriptor: int) -> None:
        with os.fdopen(descriptor, "rb") as pipe:
            for line in pipe:
                self._report = msgspec.json.decode(line, type=RunReport)

    def _follow_output(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as output:
            for line in output:
                if self._show:
                    sys.stdout.write(line.decode(errors="replace"))
                    sys.stdout.flush()


def _pickled(main: Callable[[], Any]) -> bytes:
    if not callable(main):
        raise LaunchError(f"launch() needs a function or its name, got {main!r}")
    try:
        pickled: bytes = cloudpickle.dumps(main)
    except Exception as error:
        raise LaunchError(
            f"{main!r} cannot be sent to other processes: {error}; build what it needs inside of "
            "the function"
        ) from error
    return pickled
