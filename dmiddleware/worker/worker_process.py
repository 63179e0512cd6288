"""A worker in a process of its own.

The process reads one line of JSON from standard input, ``{"role": …, "cfg": …}``, starts the
worker, and writes the port on which it listens to standard output. It ends when the coordinator
releases it, or when standard input ends, because the process that started it has died.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Final

from dmiddleware.process.first_imports import first_imports
from dmiddleware.process.torch_threads import THREADS_VARIABLE, chosen_threads
from dmiddleware.worker.comm import create_comm_collector, create_comm_learner
from dmiddleware.worker.errors import CoordinatorError

__all__ = ["WorkerProcess"]

_CREATE: Final[Mapping[str, Callable[..., Any]]] = {
    "collector": create_comm_collector,
    "learner": create_comm_learner,
}
_END_TIMEOUT_S: Final = 20.0


class WorkerProcess:
    """A communicating worker in a process of its own, on this host.

    It uses as many threads for tensors as a run in this process would.

    Args:
        role: ``collector`` or ``learner``.
        cfg: the worker's config, with ``type``; plain values.
    """

    def __init__(self, role: str, cfg: Mapping[str, Any]) -> None:
        self._role = role
        first = "".join(f"import {name}; " for name in first_imports())
        code = f"import sys; sys.path[:] = {sys.path!r}; {first}from {__name__} import main; main()"
        self._process = subprocess.Popen(
            [sys.executable, "-c", code],
            env={**os.environ, THREADS_VARIABLE: str(chosen_threads())},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C is for the process that starts it
        )
        given = {"role": role, "cfg": cfg}
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # read_port reports that it has ended
            self._process.stdin.write(json.dumps(given) + "\n")
            self._process.stdin.flush()

    def read_port(self, timeout_s: float) -> int:
        """Wait until the worker listens, and return its port.

        Raises:
            CoordinatorError: if it ends first, or does not listen within ``timeout_s`` seconds.
        """
        lines: list[str] = []
        assert self._process.stdout is not None
        reader = threading.Thread(
            target=lambda out: lines.append(out.readline()),
            args=(self._process.stdout,),
            daemon=True,
        )
        reader.start()
        reader.join(timeout_s)
        if not lines or not lines[0].strip():
            code = self._process.poll()
            state = f"within {timeout_s:g} s" if code is None else f"and ended with code {code}"
            raise CoordinatorError(
                f"the process of a {self._role} did not listen {state}; its error is above"
            )
        return int(lines[0])

    def close(self) -> None:
        """Ask the worker to end, and wait for it; kill it if it does not; may be called twice."""
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with suppress(BrokenPipeError):
                pipe.close()
        try:
            self._process.wait(_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def main() -> None:
    """Run the worker that standard input describes."""
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")
    given = json.loads(sys.stdin.readline())
    answer, sys.stdout = sys.stdout, sys.stderr  # what the worker prints is not the answer
    worker = _CREATE[given["role"]](given["cfg"])
    threading.Thread(target=_follow_parent, args=(worker,), daemon=True).start()
    with worker:
        answer.write(f"{worker.port}\n")
        answer.flush()
        worker.join()


def _follow_parent(worker: Any) -> None:
    """Close the worker when the process that started it has closed standard input, or has died."""
    sys.stdin.read()
    worker.close()
