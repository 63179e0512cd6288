"""Nodes as processes of this host."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import TracebackType
from typing import IO, Final, Self

import msgspec

from dmiddleware.launch.hosts.interface import (
    Ended,
    HostEvent,
    Note,
    Output,
    Reported,
    Started,
)
from dmiddleware.launch.leftovers import (
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


@dataclass(slots=True)
class _Process:
    """The process of one node."""

    node_id: int
    name: str
    popen: subprocess.Popen[bytes]
    mark: str
    is_killed: bool = False
    has_ended: bool = False
    streams: list[_Stream] = field(default_factory=list)


class LocalHost:
    """Starts each node as a process of this host, in a session of its own.

    Args:
        mark: the mark of all processes of the run.
    """

    def __init__(self, mark: str = "") -> None:
        self._mark = mark or new_mark()
        self._selector = selectors.DefaultSelector()
        self._kills = OutOfMemoryKills()
        self._processes: dict[int, _Process] = {}
        self._started: list[Started] = []
        self._checked_at = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for process in self._processes.values():
            self.kill(process.node_id)
        for process in self._processes.values():
            process.popen.wait()
            if process.popen.stdin is not None:
                with contextlib.suppress(OSError):
                    process.popen.stdin.close()
        end_processes((self._mark,))
        for key in list(self._selector.get_map().values()):
            key.data.stream.close()
        self._selector.close()

    def start(self, config: NodeConfig, *, n_restarts: int) -> None:
        """Start a process; see :meth:`~dmiddleware.launch.hosts.interface.Host.start`."""
        mark = new_mark()
        read_end, write_end = os.pipe()
        try:
            popen = subprocess.Popen(
                [sys.executable, "-c", _START, *config.arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=(write_end,),
                env=self._environment(config, mark, n_restarts),
            )
        except OSError:
            os.close(read_end)
            raise
        finally:
            os.close(write_end)
        process = _Process(config.plan.node_id, str(config.plan), popen, mark)
        self._processes[process.node_id] = process
        self._started.append(Started(process.node_id, f"process {popen.pid}"))
        _send(
            process,
            msgspec.structs.replace(
                config, status_fd=write_end, mark=mark, arguments=(), variables={}
            ),
        )
        assert popen.stdout is not None
        self._watch(_OutputStream(process, popen.stdout))
        self._watch(_StatusStream(process, os.fdopen(read_end, "rb", buffering=0)))

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
                os.killpg(process.popen.pid, signal.SIGKILL)

    def dump_stacks(self, node_id: int) -> None:
        """Make a process print what its threads are doing."""
        process = self._processes.get(node_id)
        if process is not None and not process.has_ended:
            process.popen.send_signal(signal.SIGQUIT)

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
                process.popen.wait(max(until - time.monotonic(), 0.0))

    def _environment(self, config: NodeConfig, mark: str, n_restarts: int) -> dict[str, str]:
        """Return the process's environment, with the variables of a learner's process group.

        Those that the launcher has itself, because torchrun has started it for example, are for
        another group.
        """
        ranks = config.plan.ranks
        environment = marked_environment(self._mark, mark)
        for name in (RANK_STORE, *RankPlan(0, 1, 0).environment()):
            environment.pop(name, None)
        if ranks is not None:
            environment |= ranks.environment()
            if config.run_dir:
                # Each start has a store of its own; all ranks are restarted together.
                environment[RANK_STORE] = f"{config.run_dir}/ranks-{n_restarts}"
        return environment | config.variables

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
        running = [one for one in self._processes.values() if not one.has_ended]
        ended = [process for process in running if process.popen.poll() is not None]
        if ended:
            # Afterwards only, as this reads the status of every process.
            n_left = end_processes(
                [process.mark for process in ended],
                sessions=[process.popen.pid for process in ended],
            )
            if n_left:
                names = ", ".join(process.name for process in ended)
                yield Note(f"ended {n_left} processes that {names} had left behind")
            for process in ended:
                yield from self._take_end(process)
        reap_orphans([one.popen.pid for one in running if one.popen.returncode is None])

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
        if process.popen.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                process.popen.stdin.close()
        code = process.popen.returncode
        was_killed = code == -signal.SIGKILL and not process.is_killed
        yield Ended(process.node_id, code, self._kills.explain() if was_killed else "")


def _send(process: _Process, message: NodeConfig | str) -> None:
    """Send a line of JSON: first the node's configuration, then a reason to stop."""
    data = msgspec.json.encode(message) + b"\n"
    if process.popen.stdin is not None:
        with contextlib.suppress(BrokenPipeError, ValueError):
            process.popen.stdin.write(data)
            process.popen.stdin.flush()


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
        found: list[HostEvent] = []
        for line in self._lines.feed(data):
            with contextlib.suppress(msgspec.DecodeError):
                status = msgspec.json.decode(line, type=NodeStatus)
                found.append(Reported(self.process.node_id, status))
        return found
