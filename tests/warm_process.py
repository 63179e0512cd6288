"""Python programs in processes that are forked from one that has imported torch.

A new process imports for a third of a second before it runs a line of a program, and for two
seconds if the program needs torch. Here one process has done so for all the tests of a worker.
Tests of what a program imports, and of the variables that a process is started with, start a
process of their own.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import gc
import importlib
import inspect
import os
import pickle
import runpy
import secrets
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import types
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final, NamedTuple, NoReturn, Self

import torch

from dmiddleware.seeding import seed_libraries

__all__ = ["NewProcess", "WarmProcess", "main", "run_warm", "warm_up"]

_IMPORTS: Final = (
    *("gymnasium", "middleware", "tyro"),
    *("dmiddleware.launch.cli", "dmiddleware.launch.launcher", "dmiddleware.launch.run"),
    *("dmiddleware.launch.run_process", "dmiddleware.env.subprocess.worker"),
    *("matplotlib.figure", "matplotlib.backends.backend_agg"),
)
_START: Final = "from tests.warm_process import main; main()"
_ROOT: Final = Path(__file__).parents[1]
_READ_AT_START: Final = ("PYTHON", "LC_", "LANG", "LD_", "MALLOC_", "MKL_", "TORCH", "CUDA")
_IS_READ_LATER: Final = ("PYTHONPATH",)
_LONGEST: Final = 1 << 17
_MOST_FILES: Final = 200
NewProcess: Final = subprocess.Popen
_UNWRITTEN: Final = 120
_MEASURED: Final = "COVERAGE_PROCESS_CONFIG"  # coverage measures nothing of such a fork
_NUMBER: Final = struct.Struct(">i")
_CHILD: Final = inspect.signature(subprocess.Popen._execute_child)  # type: ignore[attr-defined]


@dataclass(frozen=True)
class _Request:
    """A program, and what its process is to have.

    Attributes:
        words: ``-c`` and code, ``-m`` and a module, or a file; and the arguments of the program.
        cwd: its working directory.
        env: all its environment variables.
        descriptors: the numbers of its open files.
        ignores_warnings: whether it shows no warnings.
        has_session: whether it has a session of its own.
    """

    words: list[str]
    cwd: str
    env: dict[str, str]
    descriptors: list[int]
    ignores_warnings: bool
    has_session: bool

    @classmethod
    def of(cls, call: Mapping[str, Any]) -> Self | None:
        """Return what a call of ``Popen`` asks for; None: only a new process can have that."""
        words = call["args"]
        if isinstance(words, str | bytes | os.PathLike) or call["executable"] is not None:
            return None
        python, *words = map(os.fsdecode, words)
        if ignores := words[:2] == ["-W", "ignore"]:
            words = words[2:]
        env = {**os.environ} if call["env"] is None else {**call["env"]}
        is_plain = (
            python == sys.executable
            and words
            and (words[0] in ("-c", "-m") or not words[0].startswith("-"))
            and call["preexec_fn"] is None
            and not call["shell"]
            and _MEASURED not in env
            and _read_at_start(env) == _read_at_start(_warm().env)
        )
        if not is_plain:
            return None
        return cls(
            words=words,
            cwd=str(Path(os.fsdecode(call["cwd"] or Path.cwd())).resolve()),
            env=env,
            descriptors=[0, 1, 2, *call["pass_fds"]],
            ignores_warnings=ignores,
            has_session=call["start_new_session"],
        )


class WarmProcess(subprocess.Popen[Any]):
    """A process as ``subprocess.Popen`` starts it, but forked if it runs a program of Python."""

    _end: int | None = None

    def _execute_child(self, *arguments: Any) -> None:
        call = _CHILD.bind(self, *arguments).arguments
        request = _Request.of(call)
        if request is None:
            super()._execute_child(*arguments)  # type: ignore[misc]
            return
        streams = [call["p2cread"], call["c2pwrite"], call["errwrite"]]
        files = [number if end == -1 else end for number, end in enumerate(streams)]
        self._end, end = os.pipe()
        self.pid = _warm().fork(request, [*files, *call["pass_fds"], end])
        os.close(end)
        self._child_created = True
        names = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        self._close_pipe_fds(*(call[name] for name in names))  # type: ignore[attr-defined]

    def _internal_poll(self, _deadstate: int | None = None) -> int | None:
        if self._end is None:
            return super()._internal_poll(_deadstate)  # type: ignore[misc, no-any-return]
        lock: threading.Lock = self._waitpid_lock  # type: ignore[attr-defined]
        if self.returncode is None and lock.acquire(blocking=False):
            with contextlib.closing(contextlib.ExitStack()) as stack:
                stack.callback(lock.release)
                pid, status = self._try_wait(os.WNOHANG)
                if pid:
                    self._handle_exitstatus(status)  # type: ignore[attr-defined]
        return self.returncode

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        if self._end is None:
            return super()._try_wait(wait_flags)  # type: ignore[misc, no-any-return]
        poll = select.poll()
        poll.register(self._end, select.POLLIN)
        if not poll.poll(0 if wait_flags & os.WNOHANG else None):
            return 0, 0
        status = os.read(self._end, _NUMBER.size)
        os.close(self._end)
        return self.pid, _NUMBER.unpack(status)[0] if status else signal.SIGKILL


def warm_up() -> None:
    """Start the process that others are forked from, unless it runs."""
    _warm()


def run_warm(
    words: Sequence[str], *, cwd: Path, env: Mapping[str, str], timeout: float
) -> subprocess.CompletedProcess[str]:
    """Run a program as ``python -W ignore WORDS`` does, and return its exit code and output.

    Args:
        words: ``-m``, a module and its arguments; or a file and its arguments.
        cwd: the working directory.
        env: all its environment variables.
        timeout: seconds until the program is killed.

    Raises:
        subprocess.TimeoutExpired: if the program was killed.
    """
    command = [sys.executable, "-W", "ignore", *words]
    with WarmProcess(
        command, cwd=cwd, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            stdout, stderr = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(command, process.returncode, stdout, stderr)


class _Warm:
    """The process that others are forked from, as this process sees it."""

    def __init__(self) -> None:
        self.env = {key: text for key, text in os.environ.items() if key not in _IS_READ_LATER}
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._lock = threading.Lock()
        self._pid = os.getpid()
        with theirs, contextlib.ExitStack() as stack:
            stack.callback(self._socket.close)  # make test-fast skips tests that start processes
            self._process = NewProcess(
                [sys.executable, "-c", _START, str(theirs.fileno())],
                cwd=_ROOT,
                env=self.env,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
            )
            stack.pop_all()
        atexit.register(self._close)

    def fork(self, request: _Request, files: Sequence[int]) -> int:
        """Fork a process for a program, and return its id."""
        with self._lock:
            socket.send_fds(self._socket, [pickle.dumps(request)], files)
            answer = self._socket.recv(_NUMBER.size)
        number: int = _NUMBER.unpack(answer)[0]
        if number < 0:
            raise OSError(-number, os.strerror(-number))
        return number

    def _close(self) -> None:
        if os.getpid() == self._pid:
            self._socket.close()
            self._process.wait()


_warm: Final = cache(_Warm)


def _read_at_start(env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that Python or a library reads when it is loaded."""
    return {
        key: text
        for key, text in env.items()
        if key.startswith(_READ_AT_START) and key not in _IS_READ_LATER
    }


class _Fork(NamedTuple):
    """What the process for a program is forked with."""

    request: _Request
    files: list[int]


def main() -> None:
    """Fork processes for programs until the tests have ended; each of them ends here too."""
    server = socket.socket(fileno=int(sys.argv[1]))
    for name in _IMPORTS:
        importlib.import_module(name)
    for name in ("tests", __name__):
        sys.modules.pop(name, None)
    gc.freeze()
    fork = _Server(server).serve()
    if fork is None:
        os._exit(0)
    _become(*fork)


class _Server:
    """Forks processes, and reports how they end.

    Args:
        requests: where they are requested.
    """

    def __init__(self, requests: socket.socket) -> None:
        self._requests = requests
        self._ends: dict[int, int] = {}
        self._wakes, self._wake = os.pipe()
        for descriptor in (self._wakes, self._wake):
            os.set_blocking(descriptor, False)
        self._heeds_ctrl_c = signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)

    def serve(self) -> _Fork | None:
        """Serve until the tests have ended; return in each fork too."""
        poll = select.poll()
        for descriptor in (self._requests.fileno(), self._wakes):
            poll.register(descriptor, select.POLLIN)
        while True:
            ready = {descriptor for descriptor, _ in poll.poll()}
            if self._wakes in ready:
                os.read(self._wakes, _LONGEST)
                self._report_ends()
            if self._requests.fileno() in ready:
                content, files, *_ = socket.recv_fds(self._requests, _LONGEST, _MOST_FILES)
                if not content:
                    return None
                request: _Request = pickle.loads(content)
                if self._fork(request, end=files.pop(), files=files) == 0:
                    return _Fork(request, files)

    def _fork(self, request: _Request, *, end: int, files: list[int]) -> int:
        is_ready, ready = os.pipe()
        try:
            pid = os.fork()
        except OSError as error:
            pid = -(error.errno or errno.EAGAIN)
        if pid == 0:
            if request.has_session:
                os.setsid()
            self._be_forked(is_ready, ready, end)
            return 0
        os.close(ready)
        os.read(is_ready, 1)
        for descriptor in (is_ready, *files):
            os.close(descriptor)
        if pid > 0:
            self._ends[pid] = end
        else:
            os.close(end)
        self._requests.send(_NUMBER.pack(pid))
        return pid

    def _be_forked(self, *descriptors: int) -> None:
        """Leave what belongs to the server."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, self._heeds_ctrl_c)
        self._requests.close()
        for descriptor in (self._wakes, self._wake, *self._ends.values(), *descriptors):
            os.close(descriptor)

    def _report_ends(self) -> None:
        while self._ends:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            with os.fdopen(self._ends.pop(pid), "wb") as end, contextlib.suppress(BrokenPipeError):
                end.write(_NUMBER.pack(status))


def _become(request: _Request, files: list[int]) -> NoReturn:
    """Be the process of a program."""
    _place(files, request.descriptors)
    os.environ.clear()
    os.environ.update(request.env)
    os.chdir(request.cwd)
    tempfile.tempdir = None
    if n_threads := request.env.get("OMP_NUM_THREADS"):
        torch.set_num_threads(int(n_threads))
    for stream in (sys.stdout, sys.stderr):
        if os.isatty(stream.fileno()):
            stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    if request.ignores_warnings:
        warnings.simplefilter("ignore")
    seed_libraries(secrets.randbits(32))
    _end(*_run(request))


def _place(files: list[int], numbers: list[int]) -> None:
    """Give open files their numbers."""
    first = max(*files, *numbers) + 1
    for at, descriptor in enumerate(files):
        os.dup2(descriptor, first + at)
    for descriptor in files:
        os.close(descriptor)
    for at, number in enumerate(numbers):
        os.dup2(first + at, number)
        os.close(first + at)


def _run(request: _Request) -> tuple[type[BaseException], BaseException, Any] | tuple[()]:
    """Run a program, and return what it raised."""
    kind, *arguments = request.words
    folder = {"-c": "", "-m": request.cwd}.get(kind, str(Path(kind).resolve().parent))
    extra = filter(None, request.env.get("PYTHONPATH", "").split(os.pathsep))
    sys.path[:1] = [folder, *extra]
    importlib.invalidate_caches()
    program = sys.modules["__main__"] = types.ModuleType("__main__")
    program.__dict__["__builtins__"] = __builtins__
    try:
        if kind == "-m":
            sys.argv = arguments
            runpy._run_module_as_main(arguments[0])  # type: ignore[attr-defined]
        elif kind == "-c":
            sys.argv = [kind, *arguments[1:]]
            exec(compile(arguments[0], "<string>", "exec"), program.__dict__)
        else:
            sys.argv = [kind, *arguments]
            program.__dict__["__file__"] = kind
            code = compile(Path(kind).read_bytes(), kind, "exec")
            exec(code, program.__dict__)
    except BaseException as error:  # noqa: BLE001
        assert error.__traceback__ is not None
        error = error.with_traceback(error.__traceback__.tb_next)
        return type(error), error, error.__traceback__
    return ()


def _end(*raised: Any) -> NoReturn:
    """End this process as Python ends it after its program, but without freeing its memory."""
    code: Any = 0
    if raised and isinstance(raised[1], SystemExit):
        code = raised[1].code or 0
        if not isinstance(code, int):
            print(code, file=sys.stderr)
            code = 1
    elif raised:
        sys.excepthook(*raised)
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    code = _flush(code & 0xFF)
    if raised and isinstance(raised[1], KeyboardInterrupt):
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(code)


def _flush(code: int) -> int:
    """Write what was printed, and return the exit code, which says so if that fails."""
    with contextlib.suppress(Exception):
        sys.stderr.flush()
    try:
        if not sys.stdout.closed:
            sys.stdout.flush()
    except Exception as error:  # noqa: BLE001
        print(f"Exception ignored in: {sys.stdout!r}\n{error!r}", file=sys.stderr)
        return _UNWRITTEN
    return code
