"""nng's contexts and messages.

pynng's own contexts block while sending, and take about sixteen calls for a request and its reply.
:class:`Context` uses nng's functions directly, which pynng exposes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Final

import pynng
from pynng.exceptions import check_err

from dmiddleware.router.wire.arrays import view_with_release
from dmiddleware.router.wire.byte_pieces import WireBytes, write_into

__all__ = ["Context", "ContextPool", "new_message"]

_COPY_BYTES: Final = 16 * 1024
"""Shorter messages are copied and freed at once."""

_ffi, _lib = pynng.ffi, pynng.lib


class Context:
    """A context of a Req0 or Rep0 socket, which sends and receives one message at a time.

    nng 1.11 aborts the process if one thread uses a context while another closes its socket, or if
    one of nng's timeouts expires meanwhile. Contexts therefore have no timeouts, and their owner
    holds a lock whenever it uses them, and uses none after closing the socket.

    Args:
        socket: the socket.
        on_received: called when a message arrived or the wait for it ended, on one of nng's
            threads; it must return at once.
    """

    def __init__(self, socket: pynng.Socket, on_received: Callable[[Context], None]) -> None:
        self._context = _ffi.new("nng_ctx *")
        check_err(_lib.nng_ctx_open(self._context, socket.socket))
        # nng keeps only the address of the handle, so it must stay alive here.
        self._handle = _ffi.new_handle(partial(on_received, self))
        self._receiving = _new_operation(_CALL, self._handle)
        self._sending = _new_operation(_ffi.NULL, _ffi.NULL)

    @property
    def is_sending(self) -> bool:
        """Whether the last message is still being sent."""
        return bool(_lib.nng_aio_busy(self._sending))

    def send(self, message: Any) -> None:
        """Start sending a message."""
        _lib.nng_aio_set_msg(self._sending, message)
        _lib.nng_ctx_send(self._context[0], self._sending)

    def receive(self) -> None:
        """Start waiting for a message."""
        _lib.nng_ctx_recv(self._context[0], self._receiving)

    def received(self) -> tuple[memoryview, int]:
        """Return the message that arrived, and the number of its connection.

        Returns:
            The bytes are valid while a view of them is alive.

        Raises:
            NNGException: if none arrived.
        """
        check_err(_lib.nng_aio_result(self._receiving))
        message = _lib.nng_aio_get_msg(self._receiving)
        pipe = _lib.nng_pipe_id(_lib.nng_msg_get_pipe(message))
        return _view(message), pipe

    def cancel(self) -> None:
        """Stop waiting for a message; a request's reply is dropped if it arrives later."""
        _lib.nng_aio_cancel(self._receiving)

    def settle(self) -> None:
        """Wait until the last message was sent, and free it if it was not."""
        # A reply may arrive before nng has recorded that its request was sent. If the operation
        # were reused before that, nng would consider it pending forever.
        aio = self._sending
        _lib.nng_aio_wait(aio)
        if _lib.nng_aio_result(aio):
            message = _lib.nng_aio_get_msg(aio)
            if message != _ffi.NULL:
                _lib.nng_aio_set_msg(aio, _ffi.NULL)
                _lib.nng_msg_free(message)

    def close(self) -> None:
        """Free the context, after its socket was closed."""
        # nng has already closed the context itself.
        self.settle()
        _lib.nng_aio_free(self._sending)
        _lib.nng_aio_free(self._receiving)


class ContextPool:
    """The contexts of a socket, each of which is used again once it is idle.

    Its owner holds the lock of the contexts whenever it uses the pool.

    Args:
        socket: the socket.
        on_received: see :class:`Context`.
    """

    def __init__(self, socket: pynng.Socket, on_received: Callable[[Context], None]) -> None:
        self._socket = socket
        self._on_received = on_received
        self._contexts: list[Context] = []
        self._idle: list[Context] = []

    def take(self) -> Context:
        """Return an idle context, or a new one."""
        if self._idle:
            return self._idle.pop()
        context = Context(self._socket, self._on_received)
        self._contexts.append(context)
        return context

    def give_back(self, contexts: Iterable[Context]) -> None:
        """Note that contexts are idle."""
        self._idle.extend(contexts)

    def close(self) -> None:
        """Free all contexts, after the socket was closed."""
        for context in self._contexts:
            context.close()


def _new_operation(callback: Any, argument: Any) -> Any:
    made = _ffi.new("nng_aio **")
    check_err(_lib.nng_aio_alloc(made, callback, argument))
    return made[0]


def _call(handle: Any) -> None:
    _ffi.from_handle(handle)()


_CALL: Final = _ffi.callback("void(void *)", _call)


def new_message(head: bytes, content: WireBytes = b"") -> Any:
    """Copy a head and content into a new nng message."""
    size = len(head) + len(content)
    made = _ffi.new("nng_msg **")
    if _lib.nng_msg_alloc(made, size):
        raise MemoryError(f"could not allocate {size} bytes for a message")
    body = _ffi.cast("char *", _lib.nng_msg_body(made[0]))
    _ffi.memmove(body, head, len(head))
    if not content:
        return made[0]
    body += len(head)
    if size < _COPY_BYTES:
        _ffi.memmove(body, bytes(content), len(content))
    else:
        write_into(memoryview(_ffi.buffer(body, len(content))), content)
    return made[0]


def _view(message: Any) -> memoryview:
    """Return a message's memory, valid while a view of it is alive; a copy if it is small."""
    size = _lib.nng_msg_len(message)
    buffer = _ffi.buffer(_lib.nng_msg_body(message), size)
    if size < _COPY_BYTES:
        copied = memoryview(bytearray(buffer))
        _lib.nng_msg_free(message)
        return copied
    return view_with_release(buffer, partial(_lib.nng_msg_free, message))
