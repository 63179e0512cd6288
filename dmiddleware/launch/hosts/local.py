"""Nodes as processes of this host."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Final, Self, TypeAlias

import msgspec

from dmiddleware.launch.hosts.fork_server import ForkedProcess, ForkServer, adopted_orphans
from dmiddleware.launch.hosts.interface import (
    Ended,
    HostEvent,
    Note,
    Output,
    Reported,
    Started,
)
from dmiddleware.launch.leftovers import (
    MARKS,
    NO_MARK,
    end_processes,
    marked_environment,
    new_mark,
    reap_orphans,
)
from dmiddleware.launch.out_of_memory import OutOfMemoryKills
from dmiddleware.launch.output import LineSplitter
from dmiddleware.launch.plan import RANK_STORE, NodeConfig, RankPlan
from dmiddleware.launch.status import NodeStatus

__all__ = ["LocalHost"]

DRAIN_S: Final = 1.0
_CHECK_S: Final = 0.05
_LONGEST_STATUS: Final = 1 << 16
# Not with -m: programs would show the name of that module in their help.
_START: Final = "from dmiddleware.launch.node_process import main; main()"

_Variables: TypeAlias = frozenset[tuple[str, str]]


@dataclass(slots=True)
class _Process:
    """The process of one node."""

    node_id: int
    name: str
    process: subprocess.Popen[bytes] | ForkedProcess
    mark: str
    stdin: IO[bytes]
    is_killed: bool = False
    has_ended: bool = False
    streams: list[_Stream] = field(default_factory=list)

    def close_stdin(self) -> None:
        """Close its standard input, which may have been closed before."""
        with contextlib.suppress(BrokenPipeError):
            self.stdin.close()


class LocalHost:
    """Starts each node as a process of this host, in a session of its own.

    Nodes with the same environment variables are forked from one process, on Linux.

    Args:
        mark: the mark of all processes of the run.
        configs: the nodes that it will start, as far as they are known.
        imports: what the nodes will import, such as ``torch``; see
            :class:`~dmiddleware.launch.hosts.fork_server.ForkServer`.
    """

    def __init__(
        self,
        mark: str = "",
        *,
        configs: Sequence[NodeConfig] = (),
        imports: Sequence[str] = (),
    ) -> None:
        self._mark = mark or new_mark()
        self._configs = configs
        self._imports = imports
        self._selector = selectors.DefaultSelector()
        self._kills = OutOfMemoryKills()
        self._processes: dict[int, _Process] = {}
        self._servers: dict[_Variables, ForkServer] = {}
        self._is_reaper = os.getpid() == 1
        self._started: list[Started] = []
        self._checked_at = 0.0
        self._exit = contextlib.ExitStack()

    def __enter__(self) -> Self:
        counts = Counter(_variables_of(config) for config in self._configs)
        shared = [variables for variables, n_nodes in counts.items() if n_nodes > 1]
        if shared and sys.platform == "linux":
            # If that is not possible, the nodes are started one by one, or say why they are not.
            with contextlib.suppress(OSError):
                self._exit.enter_context(adopted_orphans())
                self._is_reaper = True
                for variables in shared:
                    environment = self._environment(variables)
                    self._servers[variables] = ForkServer(self._imports, environment)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with self._exit:
            for process in self._processes.values():
                self.kill(process.node_id)
            for process in self._processes.values():
                process.process.wait()
                process.close_stdin()
            for server in self._servers.values():
                server.close()
            end_processes((self._mark,))
            for key in list(self._selector.get_map().values()):
                key.data.stream.close()
            self._selector.close()

    def start(self, config: NodeConfig, *, n_restarts: int) -> None:
        """Start a process; see :meth:`~dmiddleware.launch.hosts.interface.Host.start`."""
        _check_folders(config)
        mark = new_mark()
        (stdin, to_stdin), (output, stdout), (statuses, status) = os.pipe(), os.pipe(), os.pipe()
        try:
            started, status_fd = self._start(
                config, self._own_variables(config, mark, n_restarts), (stdin, stdout, status)
            )
        except OSError:
            for descriptor in (to_stdin, output, statuses):
                os.close(descriptor)
            raise
        finally:
            for descriptor in (stdin, stdout, status):
                os.close(descriptor)
        plan = config.plan
        process = _Process(plan.node_id, str(plan), started, mark, os.fdopen(to_stdin, "wb"))
        self._processes[process.node_id] = process
        self._started.append(Started(process.node_id, f"process {started.pid}"))
        _send(
            process,
            msgspec.structs.replace(
                config, status_fd=status_fd, mark=mark, arguments=(), variables={}
            ),
        )
        self._watch(_OutputStream(process, os.fdopen(output, "rb", buffering=0)))
        self._watch(_StatusStream(process, os.fdopen(statuses, "rb", buffering=0)))

    def _start(
        self, config: NodeConfig, own: dict[str, str], streams: tuple[int, int, int]
    ) -> tuple[subprocess.Popen[bytes] | ForkedProcess, int]:
        """Start a process with its standard input, its output, and where its status goes.

        Returns:
            The process, and its descriptor of the last one.
        """
        variables = _variables_of(config)
        if (server := self._servers.get(variables)) is not None:
            try:
                return server.fork(config.arguments, own, streams)
            except (ConnectionError, TimeoutError):  # somebody has just killed it, for example
                self._servers.pop(variables).close()
        stdin, output, status = streams
        popen = subprocess.Popen(
            [sys.executable, "-c", _START, *config.arguments],
            stdin=stdin,
            stdout=output,
            stderr=output,
            start_new_session=True,
            pass_fds=(status,),
            env=self._environment(variables) | own,
        )
        return popen, status

    def events(self, timeout_s: float) -> Iterator[HostEvent]:
        """Return what the processes have printed and reported, and which have ended."""
        started, self._started = self._started, []
        yield from started
        for key, _ in self._selector.select(0.0 if started else timeout_s):
            yield from self._read(key.data) or ()
        # Each process is looked at here, and there can be hundreds that report often.
        if time.monotonic() - self._checked_at >= _CHECK_S:
            self._checked_at = time.monotonic()
            yield from self._reap()

    def stop(self, node_id: int, reason: str) -> None:
        """Send a process a reason to stop."""
        process = self._processes.get(node_id)
        if process is not None and not process.has_ended:
            _send(process, reason)

    def kill(self, node_id: int) -> None:
        """Kill a process and the others of its session."""
        process = self._processes.get(node_id)
        if process is not None and not process.has_ended:
            process.is_killed = True
            with contextlib.suppress(ProcessLookupError):
                # The whole session: env workers must not outlive their node.
                os.killpg(process.process.pid, signal.SIGKILL)

    def dump_stacks(self, node_id: int) -> None:
        """Make a process print what its threads are doing."""
        process = self._processes.get(node_id)
        if process is not None and not process.has_ended:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.process.pid, signal.SIGQUIT)

    def leave(self, reason: str, timeout_s: float) -> None:
        """Stop all processes in order; they write to their logs from now on."""
        for key in list(self._selector.get_map().values()):
            self._selector.unregister(key.fileobj)
            key.data.stream.close()
        until = time.monotonic() + timeout_s
        for node_id in self._processes:
            self.stop(node_id, reason)
        for process in self._processes.values():
            with contextlib.suppress(Exception):
                process.process.wait(max(until - time.monotonic(), 0.0))

    def _environment(self, variables: _Variables) -> dict[str, str]:
        """Return the environment that nodes with these variables share.

        The variables of a learner's process group that the launcher has itself, because torchrun
        has started it for example, are for another group.
        """
        environment = marked_environment(self._mark, NO_MARK)
        for name in (RANK_STORE, *RankPlan(0, 1, 0).environment()):
            environment.pop(name, None)
        return environment | dict(variables)

    def _own_variables(self, config: NodeConfig, mark: str, n_restarts: int) -> dict[str, str]:
        """Return the variables of one node: its marks, and those of its process group."""
        variables = {MARKS: marked_environment(self._mark, mark)[MARKS]}
        ranks = config.plan.ranks
        if ranks is not None:
            variables |= ranks.environment()
            if config.run_dir:
                # Each start has a store of its own; all ranks are restarted together.
                variables[RANK_STORE] = f"{config.run_dir}/ranks-{n_restarts}"
        return variables

    def _watch(self, stream: _Stream) -> None:
        os.set_blocking(stream.stream.fileno(), False)
        self._selector.register(stream.stream, selectors.EVENT_READ, stream)
        stream.process.streams.append(stream)

    def _read(self, stream: _Stream) -> list[HostEvent] | None:
        """Return the events of what is available; None: nothing is, for now or for good."""
        data: bytes | None = stream.stream.read(1 << 16)
        if data is None:
            return None
        if data:
            return stream.take(data)
        self._selector.unregister(stream.stream)
        stream.stream.close()
        stream.process.streams.remove(stream)
        return stream.take(data)

    def _reap(self) -> Iterator[HostEvent]:
        """Notice the processes that have ended."""
        running = [local for local in self._processes.values() if not local.has_ended]
        ended = [process for process in running if process.process.poll() is not None]
        if ended:
            # Afterwards only, as this reads the status of every process.
            n_left = end_processes(
                [process.mark for process in ended],
                sessions=[process.process.pid for process in ended],
            )
            if n_left:
                names = ", ".join(process.name for process in ended)
                yield Note(f"ended {n_left} processes that {names} had left behind")
            for process in ended:
                yield from self._take_end(process)
        for variables, server in list(self._servers.items()):
            if server.has_ended:
                self._servers.pop(variables).close()
        if self._is_reaper:
            processes = [local.process for local in running if local.process.returncode is None]
            reap_orphans([local.pid for local in (*processes, *self._servers.values())])

    def _take_end(self, process: _Process) -> Iterator[HostEvent]:
        """Yield the last words of a process that has ended, and its exit code."""
        # Processes that it started may still be running and writing.
        until = time.monotonic() + DRAIN_S
        for stream in list(process.streams):
            while stream in process.streams and time.monotonic() < until:
                events = self._read(stream)
                if events is None:
                    break
                yield from events
        process.has_ended = True
        process.close_stdin()
        code = process.process.returncode
        assert code is not None
        was_killed = code == -signal.SIGKILL and not process.is_killed
        yield Ended(process.node_id, code, self._kills.explain() if was_killed else "")


def _check_folders(config: NodeConfig) -> None:
    """Check that the folders exist which a process needs; somebody may remove them meanwhile.

    Raises:
        OSError: if one does not.
    """
    try:
        os.getcwd()  # noqa: PTH109 (Path.cwd() is the same)
    except FileNotFoundError:
        raise OSError("the working directory was removed while the run lasted") from None
    plan = config.plan
    is_needed = plan.ranks is not None or any(
        address.startswith("ipc:") for address in (plan.listen, *plan.dial)
    )
    if config.run_dir and is_needed and not Path(config.run_dir).is_dir():
        raise OSError(
            f"the folder of the run's sockets, {config.run_dir}, was removed, as by a cleaner of "
            "old files; set TMPDIR to a folder that nobody cleans, or use --protocol tcp"
        )


def _variables_of(config: NodeConfig) -> _Variables:
    return frozenset(config.variables.items())


def _send(process: _Process, message: NodeConfig | str) -> None:
    """Send a line of JSON: first the node's configuration, then a reason to stop."""
    with contextlib.suppress(BrokenPipeError, ValueError):
        process.stdin.write(msgspec.json.encode(message) + b"\n")
        process.stdin.flush()


class _Stream:
    """One stream of a process, and how to read it.

    Args:
        process: the process.
        stream: what to read.
    """

    def __init__(self, process: _Process, stream: IO[bytes]) -> None:
        self.process = process
        self.stream = stream

    def take(self, data: bytes) -> list[HostEvent]:
        """Return the events of the bytes that were read; no bytes: the stream has ended."""
        raise NotImplementedError


class _OutputStream(_Stream):
    """What a process prints."""

    def __init__(self, process: _Process, stream: IO[bytes]) -> None:
        super().__init__(process, stream)
        self._lines = LineSplitter()

    def take(self, data: bytes) -> list[HostEvent]:
        lines = self._lines.feed(data) if data else self._lines.end()
        return [Output(self.process.node_id, data, lines)]


class _StatusStream(_Stream):
    """The status of a node, one line of JSON at a time."""

    def __init__(self, process: _Process, stream: IO[bytes]) -> None:
        super().__init__(process, stream)
        self._lines = LineSplitter(_LONGEST_STATUS)

    def take(self, data: bytes) -> list[HostEvent]:
        events: list[HostEvent] = []
        for line in self._lines.feed(data):
            with contextlib.suppress(msgspec.DecodeError):
                status = msgspec.json.decode(line, type=NodeStatus)
                events.append(Reported(self.process.node_id, status))
        return events
