"""One process of envs, seen from its manager."""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import signal
import socket
import subprocess
import sys
from typing import Any

from dmiddleware.env.subprocess.channel import (
    Channel,
    ChannelClosed,
    deadline_in,
    read_what_is_there,
)
from dmiddleware.errors import EnvCrashed, EnvError, EnvProtocolError, EnvTimeout

__all__ = ["EnvProcess", "ProcessFailure"]

logger = logging.getLogger(__name__)

_START = (
    "import sys; sys.path[:] = {path!r}; "
    "from dmiddleware.env.subprocess.worker import main; main{fds!r}"
)


class ProcessFailure(Exception):
    """A process of envs is of no more use.

    Attributes:
        env_ids: the envs of the process.
        env_id: the env that failed, or the process's first one, if it is not known which did.
        doing: what was asked ("start", "reset", "step").
        error: what happened, in words that follow "env 3 …".
        details: the traceback, or what else is known.
        is_final: whether another try would fail likewise.
    """

    def __init__(
        self, env_ids: list[int], env_id: int, doing: str, error: EnvError, details: str
    ) -> None:
        super().__init__(f"env {env_id} failed in {doing}: it {error}.\n{details}")
        self.env_ids = env_ids
        self.env_id = env_id
        self.doing = doing
        self.error = error
        self.details = details
        self.is_final = isinstance(error, EnvProtocolError)

    def final(self, why: str) -> EnvError:
        """Return the error to raise when the process is not restarted, and ``why`` not."""
        return type(self.error)(
            f"env {self.env_id} failed in {self.doing}, {why}: it {self.error}.\n{self.details}"
        )


class EnvProcess:
    """Starts a process of envs, asks it, and ends it.

    The process is a session of its own: a Ctrl-C in the terminal does not reach it, and the
    processes that its envs start can be ended with it.

    Args:
        env_ids: the envs that will live in it.
    """

    def __init__(self, env_ids: list[int]) -> None:
        self.env_ids = env_ids
        ours, theirs = socket.socketpair()
        self._black_box, black_box_in = os.pipe()
        code = _START.format(path=sys.path, fds=(theirs.fileno(), black_box_in))
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", code],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(), black_box_in),
                start_new_session=True,
            )
        except BaseException:
            ours.close()
            os.close(self._black_box)
            raise
        finally:
            theirs.close()
            os.close(black_box_in)
        self._channel = Channel(ours, is_peer_alive=lambda: self._process.poll() is None)
        self._is_open = True

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._process.pid

    def request(self, kind: bytes, content: bytes = b"", *, timeout_s: float) -> None:
        """Send a request; its answer is taken with :meth:`answer`.

        A process that is gone is not noticed here, but by :meth:`answer`.
        """
        with contextlib.suppress(ChannelClosed, TimeoutError):
            self._channel.send(kind + content, deadline=deadline_in(timeout_s))

    def send_fd(self, fd: int, *, timeout_s: float) -> None:
        """Send an open file; as :meth:`request`."""
        with contextlib.suppress(ChannelClosed, TimeoutError):
            self._channel.send_fd(fd, deadline=deadline_in(timeout_s))

    def answer(self, doing: str, *, deadline: float, reset_timeout_s: float) -> Any:
        """Wait for the answer to the request before.

        Args:
            doing: what was asked, for the message of an error.
            deadline: on the monotonic clock.
            reset_timeout_s: how long to wait from when the process tells that it resets envs.

        Returns:
            The content of the answer, None if it has none.

        Raises:
            ProcessFailure: if an env raised, or the process died or did not answer in time.
        """
        ids = self.env_ids
        try:
            message = self._channel.receive(deadline=deadline)
            if message[:1] == b"r":
                doing = "reset"
                message = self._channel.receive(deadline=deadline_in(reset_timeout_s))
        except TimeoutError:
            error = EnvTimeout("did not answer in time")
            raise ProcessFailure(ids, ids[0], doing, error, self._where_it_hangs()) from None
        except ChannelClosed:
            died = EnvCrashed(f"lost its process, which {self._how_it_died()}")
            raise ProcessFailure(ids, ids[0], doing, died, self._read_black_box(0.0)) from None
        content: Any = pickle.loads(message[1:]) if len(message) > 1 else None
        if message[:1] == b"e":
            kind = EnvProtocolError if content.breaks_protocol else EnvCrashed
            raised = kind(f"raised {content.summary}")
            raise ProcessFailure(ids, content.env_id, content.doing, raised, content.details)
        return content

    def close(self, *, deadline: float) -> None:
        """Wait for the end of a process that was asked to close (request ``c``), or end it."""
        if self._is_open and not self._channel.wait_until_closed(deadline=deadline):
            logger.warning(
                "the process of envs %s did not close them in time; it is killed", self.env_ids
            )
        self.kill()

    def kill(self) -> None:
        """End the process at once, and those that its envs started; a second call does nothing."""
        if not self._is_open:
            return
        self._is_open = False
        # The group outlives its leader until the leader is waited for.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=5.0)
        self._channel.close()
        os.close(self._black_box)

    def _how_it_died(self) -> str:
        try:
            code = self._process.wait(timeout=5.0)
        except subprocess.TimeoutExpired:
            return "closed its socket"
        if code >= 0:
            return f"exited with code {code}"
        with contextlib.suppress(ValueError):
            return f"was ended by {signal.Signals(-code).name}"
        return f"was ended by signal {-code}"

    def _where_it_hangs(self) -> str:
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGUSR1)
        found = self._read_black_box(1.0)
        return f"It hangs here:\n{found}" if found else "It does not even tell where it hangs."

    def _read_black_box(self, wait_s: float) -> str:
        return read_what_is_there(self._black_box, wait_s=wait_s)
