"""The processes of the envs of one manager."""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import cloudpickle
import gymnasium as gym
from gymnasium import spaces

from dmiddleware.env.contract import check_same_spaces
from dmiddleware.env.subprocess.shared_arrays import SharedArrays
from dmiddleware.env.subprocess.worker import Setup, StepInfos
from dmiddleware.errors import ConfigError, EnvCrashed, EnvError, EnvProtocolError, EnvTimeout
from dmiddleware.process.first_imports import first_imports
from dmiddleware.process.import_guard import refuse_at_import
from dmiddleware.process.open_files import naming_the_limit
from dmiddleware.process.pipes import MessagePipe, PipeClosed, deadline_in, read_available

__all__ = ["EnvProcess", "EnvProcesses", "ProcessFailure"]

logger = logging.getLogger(__name__)

SpacePair: TypeAlias = tuple[spaces.Space[Any], spaces.Space[Any]]

_START = (
    "import sys; sys.path[:] = {path!r}; {first}"
    "from dmiddleware.env.subprocess.worker import main; main{fds!r}"
)


class ProcessFailure(Exception):
    """A process of envs has failed and must be restarted or given up.

    Attributes:
        env_ids: the envs of the process.
        env_id: the env that failed; the first one of the process if that is not known.
        doing: the request that failed ("start", "reset", "step").
        error: what happened, in words that follow "it …".
        details: the traceback, or whatever else is known.
        cause: what the env raised; None: its process died or hangs.
        is_final: whether a restart would fail in the same way.
    """

    def __init__(
        self,
        env_ids: list[int],
        env_id: int,
        doing: str,
        error: EnvError,
        details: str,
        cause: Exception | None = None,
    ) -> None:
        super().__init__(f"env {env_id} failed in {doing}: it {error}.\n{details}")
        self.env_ids = env_ids
        self.env_id = env_id
        self.doing = doing
        self.error = error
        self.details = details
        self.cause = cause
        self.is_final = isinstance(error, EnvProtocolError)

    def final(self, why: str) -> EnvError:
        """Return the error to raise if the process is not restarted; ``why`` gives the reason."""
        error = type(self.error)(
            f"env {self.env_id} failed in {self.doing}, {why}: it {self.error}.\n{self.details}"
        )
        error.__cause__ = self.cause
        return error


class EnvProcess:
    """Starts, queries and stops one process of envs.

    The process gets its own session: Ctrl-C in the terminal does not reach it, and the processes
    that its envs start can be killed with it.

    Args:
        env_ids: the envs of the process.
    """

    def __init__(self, env_ids: list[int]) -> None:
        refuse_at_import("starts processes of envs")
        self.env_ids = env_ids
        ours, theirs = socket.socketpair()
        self._traceback_fd, traceback_in = os.pipe()
        first = "".join(f"import {name}; " for name in first_imports())
        fds = theirs.fileno(), traceback_in
        code = _START.format(path=sys.path, first=first, fds=fds)
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", code],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(), traceback_in),
                start_new_session=True,
            )
        except BaseException:
            ours.close()
            os.close(self._traceback_fd)
            raise
        finally:
            theirs.close()
            os.close(traceback_in)
        self._pipe = MessagePipe(ours, is_peer_alive=lambda: self._process.poll() is None)
        self._is_open = True

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._process.pid

    def request(self, kind: bytes, content: bytes = b"", *, timeout_s: float) -> None:
        """Send a request, whose answer :meth:`answer` reads.

        If the process is dead, :meth:`answer` raises.
        """
        with contextlib.suppress(PipeClosed, TimeoutError):
            self._pipe.send(kind + content, deadline=deadline_in(timeout_s))

    def send_fd(self, fd: int, *, timeout_s: float) -> None:
        """Send an open file, like :meth:`request`."""
        with contextlib.suppress(PipeClosed, TimeoutError):
            self._pipe.send_fd(fd, deadline=deadline_in(timeout_s))

    def answer(self, doing: str, *, deadline: float, reset_timeout_s: float) -> Any:
        """Wait for the answer to the last request.

        Args:
            doing: the request, for error messages.
            deadline: on the monotonic clock.
            reset_timeout_s: how long to wait after the process has reported that it resets envs.

        Returns:
            The content of the answer; None if it is empty.

        Raises:
            ProcessFailure: if an env raised, or the process died or did not answer in time.
        """
        ids = self.env_ids
        try:
            message = self._pipe.receive(deadline=deadline)
            if message[:1] == b"r":
                doing = "reset"
                message = self._pipe.receive(deadline=deadline_in(reset_timeout_s))
        except TimeoutError:
            error = EnvTimeout("did not answer in time")
            raise ProcessFailure(ids, ids[0], doing, error, self._where_it_hangs()) from None
        except PipeClosed:
            died = EnvCrashed(f"lost its process, which {self._how_it_died()}")
            raise ProcessFailure(ids, ids[0], doing, died, self._read_traceback(0.0)) from None
        content: Any = pickle.loads(message[1:]) if len(message) > 1 else None
        if message[:1] == b"e":
            kind = EnvProtocolError if content.breaks_protocol else EnvCrashed
            raised = kind(f"raised {content.summary}")
            raise ProcessFailure(
                ids, content.env_id, content.doing, raised, content.details, content.error.error()
            )
        return content

    def close(self, *, deadline: float) -> None:
        """Wait until a process that was asked to close (request ``c``) exits, or kill it."""
        if self._is_open and not self._pipe.wait_until_closed(deadline=deadline):
            logger.warning(
                "the process of envs %s did not close them in time; killing it", self.env_ids
            )
        self.kill()

    def kill(self) -> None:
        """Kill the process and those that its envs started; a second call does nothing."""
        if not self._is_open:
            return
        self._is_open = False
        # The group outlives its leader until the leader is waited for.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=5.0)
        self._pipe.close()
        os.close(self._traceback_fd)

    def _how_it_died(self) -> str:
        try:
            code = self._process.wait(timeout=5.0)
        except subprocess.TimeoutExpired:
            return "closed its socket"
        if code >= 0:
            return f"exited with code {code}"
        with contextlib.suppress(ValueError):
            return f"was killed by {signal.Signals(-code).name}"
        return f"was killed by signal {-code}"

    def _where_it_hangs(self) -> str:
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGUSR1)
        traceback = self._read_traceback(1.0)
        return f"It hangs here:\n{traceback}" if traceback else "It does not report where it hangs."

    def _read_traceback(self, wait_s: float) -> str:
        return read_available(self._traceback_fd, wait_s=wait_s)


class EnvProcesses:
    """Starts the processes of envs, sends them requests in parallel, and stops them.

    If some processes fail to answer a request, it returns the answers of the others and the
    failures; the caller decides what to do about them (:meth:`restart`, :meth:`close`).

    Attributes:
        is_busy: whether a thread waits for answers of the processes.

    Args:
        env_fns: one factory per env.
        envs_per_process: how many envs share a process.
        step_timeout_s: how long a step of one env may take.
        reset_timeout_s: how long a reset of one env, or the start of its process, may take.

    Raises:
        ConfigError: if a factory cannot be pickled.
    """

    def __init__(
        self,
        env_fns: Sequence[Callable[[], gym.Env[Any, Any]]],
        *,
        envs_per_process: int,
        step_timeout_s: float,
        reset_timeout_s: float,
    ) -> None:
        self._env_num = len(env_fns)
        self._envs_per_process = envs_per_process
        self._step_timeout_s = step_timeout_s
        self._reset_timeout_s = reset_timeout_s
        ids = range(self._env_num)
        groups = [list(ids[at : at + envs_per_process]) for at in ids[::envs_per_process]]
        self._setups = [_pickled_setup(group, env_fns) for group in groups]
        self._processes: dict[int, EnvProcess] = {}
        self.is_busy = False
        self._spaces: SpacePair | None = None
        self._shared: SharedArrays | None = None

    @property
    def pids(self) -> tuple[int, ...]:
        """The process ids, in the order of their envs."""
        return tuple(self._processes[index].pid for index in sorted(self._processes))

    @property
    def spaces(self) -> SpacePair:
        """The observation and action space of a single env, known after :meth:`start`."""
        assert self._spaces is not None
        return self._spaces

    @property
    def memory(self) -> SharedArrays:
        """The memory shared with the envs, available after :meth:`start`."""
        assert self._shared is not None
        return self._shared

    def start(
        self, seeds: Mapping[int, int], given: Mapping[int, bytes]
    ) -> tuple[dict[int, Any], list[ProcessFailure]]:
        """Start all processes, make the envs and reset them.

        Args:
            seeds: the seeds of the resets, by env id; envs that are not in it are not seeded.
            given: what a program has set on the envs, by env id, see
                :data:`~dmiddleware.env.subprocess.worker.Given`.

        Returns:
            The infos of the resets, by env id, and the failures. The observations are in
            ``memory.first_obs``.

        Raises:
            EnvProtocolError: if the envs differ in their spaces.
        """
        return self._start(range(len(self._setups)), seeds, given)

    def restart(
        self,
        failures: Iterable[ProcessFailure],
        seeds: Mapping[int, int],
        given: Mapping[int, bytes],
    ) -> tuple[dict[int, Any], list[ProcessFailure]]:
        """Restart the processes that failed; otherwise like :meth:`start`."""
        indices = [self._index_of(failure.env_ids[0]) for failure in failures]
        for index in indices:
            self._processes.pop(index).kill()
        return self._start(indices, seeds, given)

    def step(self, env_ids: list[int] | None) -> tuple[StepInfos, list[ProcessFailure]]:
        """Step envs with the actions in ``memory.action``, and reset those whose episode ends.

        Args:
            env_ids: the envs; None means all.

        Returns:
            The infos and the failures; everything else is in the memory.
        """
        if env_ids is None:
            contents = dict.fromkeys(self._processes, b"")
        else:
            groups = self._by_process(dict.fromkeys(env_ids))
            contents = {index: pickle.dumps(list(group)) for index, group in groups.items()}
        answers, failures = self._exchange(b"s", contents, "step", self._step_timeout_s)
        merged = StepInfos()
        for answer in answers.values():
            if answer is not None:
                merged.last |= answer.last
                merged.first |= answer.first
        return merged, failures

    def ask(
        self, kind: bytes, values: Mapping[int, Any], doing: str
    ) -> tuple[dict[int, Any], list[ProcessFailure]]:
        """Send a request to single envs; the deadline is that of a reset.

        Args:
            kind: the kind of request, see :mod:`dmiddleware.env.subprocess.worker`.
            values: the content, by env id.
            doing: the request, for error messages.

        Returns:
            The answers, by env id, and the failures.
        """
        groups = self._by_process(values)
        contents = {index: pickle.dumps(group) for index, group in groups.items()}
        answers, failures = self._exchange(kind, contents, doing, self._reset_timeout_s)
        return _merged(answers), failures

    def close(self, *, timeout_s: float) -> None:
        """Let the processes close their envs and exit; a second call does nothing.

        Args:
            timeout_s: after this time, processes that are still running are killed.
        """
        processes, self._processes = self._processes, {}
        for process in processes.values():
            process.request(b"c", timeout_s=0.1)
        deadline = deadline_in(timeout_s)
        for process in processes.values():
            process.close(deadline=deadline)
        if self._shared is not None:
            self._shared.close()
            self._shared = None

    def _start(
        self, indices: Iterable[int], seeds: Mapping[int, int], given: Mapping[int, bytes]
    ) -> tuple[dict[int, Any], list[ProcessFailure]]:
        for index in indices:
            first = index * self._envs_per_process
            last = min(first + self._envs_per_process, self._env_num)
            with naming_the_limit(f"start the process of env {first} of {self._env_num}"):
                self._processes[index] = EnvProcess(list(range(first, last)))
        timeout_s = self._reset_timeout_s
        setups = {index: self._setups[index] for index in indices}
        answered, failures = self._exchange(b"i", setups, "start", timeout_s)
        self._take_spaces([pair for index in sorted(answered) for pair in answered[index]])
        for index in answered:
            self._processes[index].request(b"m", timeout_s=timeout_s)
            self._processes[index].send_fd(self.memory.fileno(), timeout_s=timeout_s)
        mapped, more = self._answers(answered, "start", timeout_s)
        ready = {
            index: pickle.dumps(
                {key: (seeds.get(key), given.get(key)) for key in self._processes[index].env_ids}
            )
            for index in mapped
        }
        infos, still_more = self._exchange(b"r", ready, "reset", timeout_s)
        return _merged(infos), [*failures, *more, *still_more]

    def _take_spaces(self, found: list[SpacePair]) -> None:
        """Create the memory once the spaces are known, and reject envs whose spaces differ."""
        if not found:
            return
        check_same_spaces(found if self._spaces is None else [self._spaces, *found])
        if self._shared is None:
            self._spaces = found[0]
            self._shared = SharedArrays(*found[0], self._env_num)

    def _exchange(
        self, kind: bytes, contents: Mapping[int, bytes], doing: str, timeout_s: float
    ) -> tuple[dict[int, Any], list[ProcessFailure]]:
        self.is_busy = True
        try:
            for index, content in contents.items():
                process = self._processes[index]
                process.request(kind, content, timeout_s=timeout_s * len(process.env_ids))
            return self._answers(contents, doing, timeout_s)
        finally:
            self.is_busy = False

    def _answers(
        self, indices: Iterable[int], doing: str, timeout_s: float
    ) -> tuple[dict[int, Any], list[ProcessFailure]]:
        """Read the answers by process; the deadline is ``timeout_s`` from now for each env."""
        answers: dict[int, Any] = {}
        failures: list[ProcessFailure] = []
        begun = time.monotonic()
        for index in indices:
            process = self._processes[index]
            n_envs = len(process.env_ids)
            try:
                answers[index] = process.answer(
                    doing,
                    deadline=begun + timeout_s * n_envs,
                    reset_timeout_s=self._reset_timeout_s * n_envs,
                )
            except ProcessFailure as failure:
                failures.append(failure)
                if isinstance(failure.error, EnvTimeout):
                    # It would not answer a request to close either.
                    process.kill()
        return answers, failures

    def _index_of(self, env_id: int) -> int:
        return env_id // self._envs_per_process

    def _by_process(self, values: Mapping[int, Any]) -> dict[int, dict[int, Any]]:
        groups: dict[int, dict[int, Any]] = {}
        for env_id, value in values.items():
            groups.setdefault(self._index_of(env_id), {})[env_id] = value
        return groups


def _pickled_setup(env_ids: list[int], env_fns: Sequence[Callable[[], gym.Env[Any, Any]]]) -> bytes:
    setup = Setup({env_id: env_fns[env_id] for env_id in env_ids}, len(env_fns))
    try:
        return bytes(cloudpickle.dumps(setup))
    except Exception as error:
        raise ConfigError(
            f"the factory of env {env_ids[0]} cannot be sent to a process: "
            f"{type(error).__name__}: {error}; create what it needs inside the factory, or use "
            'mode="sync"'
        ) from error


def _merged(answers: Mapping[int, dict[int, Any] | None]) -> dict[int, Any]:
    return {
        env_id: item for answer in answers.values() if answer for env_id, item in answer.items()
    }
