"""A process that has imported what the nodes need, and forks itself for each of them.

A process that imports torch is busy for seconds before it runs a line of the program. Here one
process does so for all. A node that is forked has what a new process has: a session, its streams,
its arguments and variables, random numbers of its own, and the launcher as its parent.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import math
import os
import pickle
import pkgutil
import secrets
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, TypeAlias

from dmiddleware.launch import node_process
from dmiddleware.launch.leftovers import MARKS, wait_until
from dmiddleware.process.garbage import kept_for_good
from dmiddleware.process.pipes import MessagePipe, PipeClosed, deadline_in
from dmiddleware.seeding import seed_libraries

__all__ = ["ForkServer", "ForkedProcess", "adopted_orphans", "fork_orphan", "main"]

_ANSWERS_WITHIN_S: Final = 60.0  # it may read torch from a slow disk
_START: Final = "from dmiddleware.launch.hosts.fork_server import main; main()"
_PID: Final = struct.Struct(">i")
_N_STREAMS: Final = 3
_SET_CHILD_SUBREAPER: Final = 36

_Request: TypeAlias = tuple[Sequence[str], Mapping[str, str], Sequence[int]]


class ForkServer:
    """A process that forks itself for nodes; only on Linux.

    Its nodes become children of this process within :func:`adopted_orphans`.

    Args:
        imports: what it imports at its start, such as ``torch`` or ``dmiddleware.Task``; what does
            not exist is left out.
        environment: the environment variables that all its nodes have. The last of the marks is
            replaced in each node.
    """

    def __init__(self, imports: Sequence[str], environment: Mapping[str, str]) -> None:
        ours, theirs = socket.socketpair()
        self._pipe = MessagePipe(ours)
        with theirs, contextlib.ExitStack() as stack:
            stack.callback(self._pipe.close)
            self._process = subprocess.Popen(
                [sys.executable, "-c", _START, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,  # an import that fails does so in the nodes too
                start_new_session=True,
                pass_fds=(theirs.fileno(),),
                env=environment,
            )
            stack.pop_all()
        self.pid = self._process.pid
        self._pipe.send(pickle.dumps(tuple(imports)), deadline=deadline_in(_ANSWERS_WITHIN_S))

    def fork(
        self, arguments: Sequence[str], variables: Mapping[str, str], streams: Sequence[int]
    ) -> tuple[ForkedProcess, int]:
        """Fork a node.

        Args:
            arguments: those of the program.
            variables: the environment variables that this node alone has, with its marks.
            streams: its standard input, its output, and what it writes its status to.

        Returns:
            The process, and its descriptor of the last stream.

        Raises:
            OSError: if the system allows no further process; a ``ConnectionError`` or
                ``TimeoutError`` if this server has ended or does not answer.
        """
        pipe, deadline = self._pipe, deadline_in(_ANSWERS_WITHIN_S)
        pipe.send(pickle.dumps((tuple(arguments), dict(variables))), deadline=deadline)
        for stream in streams:
            pipe.send_fd(stream, deadline=deadline)
        pid, status, error = pickle.loads(pipe.receive(deadline=deadline))
        if error:
            raise OSError(error, os.strerror(error))
        return ForkedProcess(pid), status

    @property
    def has_ended(self) -> bool:
        """Whether it has ended by itself, or somebody has killed it."""
        return self._process.poll() is not None

    def close(self) -> None:
        """End the server; its nodes continue."""
        self._pipe.close()
        self._process.kill()
        self._process.wait()


class ForkedProcess:
    """A process that was forked for this one, its parent now.

    Args:
        pid: its id.

    Attributes:
        returncode: as that of ``subprocess.Popen``.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return its exit code; None: it runs."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> None:
        """Wait until it has ended, or the time in seconds is up."""
        wait_until(lambda: self.poll() is not None, math.inf if timeout is None else timeout)


@contextlib.contextmanager
def adopted_orphans() -> Iterator[None]:
    """Be the parent of the descendants that lose theirs while the block runs.

    Raises:
        OSError: if the system does not allow that.
    """
    set_option = ctypes.CDLL(None, use_errno=True).prctl
    if set_option(_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "cannot adopt orphans")
    try:
        yield
    finally:
        set_option(_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def main() -> None:
    """Serve the launcher until it closes its end; the fork for a node runs the node instead."""
    request = None
    with (
        contextlib.closing(MessagePipe(socket.socket(fileno=int(sys.argv[1])))) as launcher,
        contextlib.suppress(PipeClosed),
    ):
        request = _serve(launcher)
    if request is not None:
        _become_node(*request)
        node_process.main()


def _serve(launcher: MessagePipe) -> _Request | None:
    """Fork for each request; return it in the process that was forked for it."""
    imports = pickle.loads(launcher.receive())
    with kept_for_good():
        for name in imports:
            with contextlib.suppress(Exception):
                pkgutil.resolve_name(name)
    if "pynng" in sys.modules:
        return None  # nng cannot be used after a fork; the nodes are started one by one
    while True:
        arguments, variables = pickle.loads(launcher.receive())
        streams = [launcher.receive_fd() for _ in range(_N_STREAMS)]
        try:
            pid, error = fork_orphan(), 0
        except OSError as failure:
            pid, error = -1, failure.errno or errno.EAGAIN
        if pid == 0:
            return arguments, variables, streams
        launcher.send(pickle.dumps((pid, streams[-1], error)))
        for stream in streams:
            os.close(stream)


def fork_orphan() -> int:
    """Fork a process with a session of its own, and leave it to the launcher.

    Returns:
        Its id; 0 in the process itself.

    Raises:
        OSError: if the system allows no further process.
    """
    read_end, write_end = os.pipe()
    with os.fdopen(read_end, "rb") as reader, os.fdopen(write_end, "wb", buffering=0) as writer:
        between = os.fork()
        if between == 0:
            _become_orphan()
            writer.write(_PID.pack(os.getpid()))
            return 0
        writer.close()
        pid = reader.read()
    # From here on, the launcher is its parent.
    code = os.waitstatus_to_exitcode(os.waitpid(between, 0)[1])
    if not pid:
        raise OSError(code, "cannot fork")
    return int(_PID.unpack(pid)[0])


def _become_orphan() -> None:
    """Fork again, and return in the process whose parent has ended."""
    try:
        pid = os.fork()
    except OSError as error:
        os._exit(error.errno or 0)
    if pid:
        os._exit(0)
    os.setsid()


def _become_node(
    arguments: Sequence[str], variables: Mapping[str, str], streams: Sequence[int]
) -> None:
    """Take what a process that is started would have from its start."""
    for number, stream in zip((0, 1, 2), (streams[0], streams[1], streams[1]), strict=True):
        os.dup2(stream, number)
    for stream in streams[:-1]:
        os.close(stream)
    sys.argv[1:] = arguments
    _show_marks(variables[MARKS])
    os.environ.update(variables)
    if "numpy" in sys.modules:
        # Or all nodes would draw the same numbers. Python's own generator does so by itself.
        seed_libraries(secrets.randbits(32))


def _show_marks(marks: str) -> None:
    """Change the marks in what the system shows of this process.

    It shows the variables with which a process was started, where they were put then.
    """
    get = ctypes.CDLL(None).getenv
    get.restype = ctypes.c_void_p
    ctypes.memmove(get(MARKS.encode()), marks.encode(), len(marks))
