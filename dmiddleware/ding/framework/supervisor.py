"""The face of ``ding.framework.supervisor``: objects in processes or threads of their own."""

from __future__ import annotations

import multiprocessing
import queue
import threading
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final

__all__ = ["ChildType", "RecvPayload", "SendPayload", "Supervisor"]

REFUSED: Final = {
    name: "it is a part of Supervisor; use Supervisor, or EnvSupervisor of ding.envs"
    for name in ("Child", "ChildProcess", "ChildThread", "ReserveMethod", "SharedObject")
}

_ATTRIBUTE: Final = "__getattribute__"
"""The method of every object that returns one of its attributes."""

_STOPS_S: Final = 5.0


class ChildType(Enum):
    """Whether children have processes of their own."""

    PROCESS = "process"
    THREAD = "thread"


@dataclass
class SendPayload:
    """A call of a method of one child.

    Attributes:
        proc_id: the child's number.
        req_id: identifies the call.
        method: the method's name.
        args: positional arguments.
        kwargs: keyword arguments.
    """

    proc_id: int
    req_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    method: str | None = None
    args: Sequence[Any] = field(default_factory=list)
    kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass
class RecvPayload:
    """The answer to a call.

    Attributes:
        proc_id: the child's number.
        req_id: identifies the call.
        method: the method's name.
        data: what the method returned.
        err: what it raised, or a TimeoutError.
        extra: for the program.
    """

    proc_id: int
    req_id: str | None = None
    method: str | None = None
    data: Any = None
    err: Exception | None = None
    extra: Any = None


def _serve(
    proc_id: int, make: Any, calls: Any, answers: Any, shm_buffer: Any, shm_callback: Any
) -> None:
    """Answer calls until there is a None."""
    subject = make() if callable(make) else make
    while (call := calls.get()) is not None:
        answer = RecvPayload(proc_id, call.req_id, call.method)
        try:
            answer.data = getattr(subject, call.method)(*call.args, **call.kwargs)
            if shm_buffer is not None and shm_callback is not None:
                shm_callback(answer, shm_buffer)
        except Exception as error:  # noqa: BLE001 (the program gets it)
            answer.err = error
        answers.put(answer)


class _Child:
    """One object, its process or thread, and the calls that it has yet to answer."""

    def __init__(self, context: Any, proc_id: int, make: Any, *shared: Any) -> None:
        self._context, self._proc_id, self._make, self._shared = context, proc_id, make, shared
        self._worker: Any = None
        self._calls: Any = None
        self._answers: Any = None

    def start(self, answers: Any) -> None:
        self._answers = answers
        self._calls = queue.Queue() if self._context is None else self._context.Queue()
        kind = threading.Thread if self._context is None else self._context.Process
        parts = (self._proc_id, self._make, self._calls, answers, *self._shared)
        self._worker = kind(target=_serve, args=parts, daemon=True)
        self._worker.start()

    def send(self, call: SendPayload | None) -> None:
        self._calls.put(call)

    def shutdown(self, timeout: float | None = None) -> None:
        """End the worker; a thread that works for longer ends when it has finished."""
        self.send(None)
        self._worker.join(_STOPS_S if timeout is None else timeout)
        if self._context is not None:
            # One that is killed while it answers would keep the lock of the answers.
            self._worker.terminate()
            self._worker.join()
            self._calls.close()

    def restart(self) -> None:
        """Begin again with a new object."""
        self.shutdown()
        self.start(self._answers)


class Supervisor:
    """Keeps an object in each of several processes or threads, and calls its methods.

    Any other attribute of it is a list, the attribute of each object.

    Args:
        type_: whether they are processes.
        mp_ctx: the context of multiprocessing; None: they are forked, so that their objects may be
            made by any function.
    """

    def __init__(self, type_: ChildType, mp_ctx: Any = None) -> None:
        processes = mp_ctx or multiprocessing.get_context("fork")
        self._context = processes if type_ is ChildType.PROCESS else None
        self._children: list[_Child] = []
        self._answers: Any = None

    def register(
        self,
        init: Callable[[], Any] | object,
        shm_buffer: Any = None,
        shm_callback: Callable[[RecvPayload, Any], None] | None = None,
    ) -> None:
        """Add an object.

        Args:
            init: the object, or a function that makes it where it is used.
            shm_buffer: memory that this process shares with it.
            shm_callback: called there with each answer and the memory, and may change both.
        """
        number = len(self._children)
        self._children.append(_Child(self._context, number, init, shm_buffer, shm_callback))

    def start_link(self) -> None:
        """Start the processes or threads; twice is once."""
        if self._answers is None:
            self._answers = queue.Queue() if self._context is None else self._context.Queue()
            for child in self._children:
                child.start(self._answers)

    def send(self, payload: SendPayload) -> None:
        """Call a method, without waiting for its answer.

        Raises:
            RuntimeError: before :meth:`start_link`.
        """
        if self._answers is None:
            raise RuntimeError("the supervisor is not running; call start_link() first")
        self._children[payload.proc_id].send(payload)

    def recv(self, ignore_err: bool = False, timeout: float | None = None) -> RecvPayload:
        """Wait for the next answer.

        Args:
            ignore_err: whether to return an answer that is an error.
            timeout: seconds to wait.

        Raises:
            queue.Empty: after the timeout.
            Exception: the error of the method.
        """
        answer: RecvPayload = self._answers.get(timeout=timeout)
        if answer.err is not None and not ignore_err:
            raise answer.err
        return answer

    def recv_all(
        self,
        send_payloads: Sequence[SendPayload],
        ignore_err: bool = False,
        callback: Callable[[RecvPayload, dict[str, SendPayload]], None] | None = None,
        timeout: float | None = None,
    ) -> list[RecvPayload]:
        """Wait for the answers to some calls; those to others stay for later.

        Args:
            send_payloads: the calls.
            ignore_err: whether to return answers that are errors, or that are late.
            callback: called with each answer and the calls that are left, by ``req_id``, to which
                it may add some.
            timeout: seconds to wait for each answer.

        Returns:
            The answers, in the order of the calls.

        Raises:
            TimeoutError: if an answer is late.
            Exception: the error of a method.
        """
        pending = {call.req_id: call for call in send_payloads}
        answers: dict[str | None, RecvPayload] = {}
        unrelated = []
        try:
            while pending:
                for answer in self._next_of(pending, ignore_err, timeout):
                    if answer.req_id not in pending:
                        unrelated.append(answer)
                        continue
                    del pending[answer.req_id]
                    answers[answer.req_id] = answer
                    if callback is not None:
                        callback(answer, pending)
        finally:
            for answer in unrelated:
                self._answers.put(answer)
        return [answers[call.req_id] for call in send_payloads]

    def _next_of(
        self, pending: dict[str, SendPayload], ignore_err: bool, timeout: float | None
    ) -> list[RecvPayload]:
        """Return the next answer, or, after the timeout, an error for each call that is left."""
        try:
            return [self.recv(ignore_err, timeout)]
        except queue.Empty:
            late = TimeoutError(f"{len(pending)} calls were not answered within {timeout:g} s")
            if not ignore_err:
                raise late from None
            return [RecvPayload(x.proc_id, x.req_id, x.method, err=late) for x in pending.values()]

    def get_child_attr(self, proc_id: int, key: str) -> Any:
        """Return an attribute of one object."""
        call = SendPayload(proc_id, method=_ATTRIBUTE, args=[key])
        self.send(call)
        return self.recv_all([call])[0].data

    def __getattr__(self, key: str) -> list[Any]:
        if key.startswith("_"):
            raise AttributeError(key)
        return [self.get_child_attr(number, key) for number in range(len(self._children))]

    def shutdown(self, timeout: float | None = None) -> None:
        """End the processes or threads.

        Args:
            timeout: seconds until a process that still works is killed; None: 5.
        """
        if self._answers is not None:
            for child in self._children:
                child.shutdown(timeout)
            self._answers = None
