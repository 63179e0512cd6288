"""One context of an nng socket: it sends without waiting, and receives without copying.

pynng's own contexts wait for each sending, and take some sixteen calls for a request and its
answer. These take nng's functions, which pynng passes through, and keep what can be kept.
"""

from __future__ import annotations

import threading
from functools import partial
from typing import Any, Final

import pynng
from pynng.exceptions import check_err

from dmiddleware.router.wire.byte_pieces import Raw, lend, write_into

__all__ = ["Context", "Gate"]

_COPY_BYTES: Final = 16 * 1024
"""Shorter messages are copied, and freed at once."""

_JOIN_S: Final = 5.0

_ffi, _lib = pynng.ffi, pynng.lib


class Gate:
    """Lets threads use a socket until it is closed, which waits for those that are at it.

    nng 1.11 aborts the process when one of its calls uses a context whose socket another closes.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._inside = 0
        self._closed = False

    def __enter__(self) -> None:
        with self._changed:
            if self._closed:
                raise pynng.Closed("Object closed", _lib.NNG_ECLOSED)
            self._inside += 1

    def __exit__(self, *error: object) -> None:
        with self._changed:
            self._inside -= 1
            if self._closed and not self._inside:
                self._changed.notify_all()

    def close(self) -> None:
        """Let no one in, and wait until all are out."""
        with self._changed:
            self._closed = True
            self._changed.wait_for(lambda: not self._inside, _JOIN_S)


class Context:
    """A context of a Req0 or Rep0 socket, used by one thread at a time.

    Args:
        socket: whose; it gives its timeouts to the context.
        gate: of the socket.

    Raises:
        Closed: if the gate is closed; so do the other methods.
    """

    def __init__(self, socket: pynng.Socket, gate: Gate) -> None:
        self._gate = gate
        self._closed = False
        self._context = _ffi.new("nng_ctx *")
        with gate:
            check_err(_lib.nng_ctx_open(self._context, socket.socket))
        self._sending = _new_operation()
        self._receiving = _new_operation()

    @property
    def is_sending(self) -> bool:
        """Whether what was sent last has not gone out yet."""
        return bool(_lib.nng_aio_busy(self._sending))

    def send(self, content: Raw) -> None:
        """Begin to send a message, without waiting until it has gone out.

        Each byte of a large one is copied once.
        """
        # All of it within the gate: an answer may come when its listener is closed, and the
        # operation is freed.
        with self._gate:
            self._settle()
            _lib.nng_aio_set_msg(self._sending, _message(content))
            _lib.nng_ctx_send(self._context[0], self._sending)

    def receive(self) -> memoryview:
        """Wait for a message.

        Returns:
            Its bytes, valid as long as a view of them lives.

        Raises:
            NNGException: if there was none in the socket's time, or the socket was closed.
        """
        return _view(self._receive())

    def receive_with_pipe(self) -> tuple[memoryview, Any]:
        """Wait for a message, and tell which connection it came over, too."""
        message = self._receive()
        pipe = _lib.nng_msg_get_pipe(message)
        return _view(message), pipe

    def close(self) -> None:
        """Close the context; twice is fine.

        After its socket, or beside it by no other thread: nng aborts the process otherwise.
        """
        if self._closed:
            return
        self._closed = True
        # With its socket nng has closed it already.
        _lib.nng_ctx_close(self._context[0])
        self._settle()
        _lib.nng_aio_free(self._sending)
        _lib.nng_aio_free(self._receiving)

    def _receive(self) -> Any:
        # Waiting is a call of its own: nng_ctx_recvmsg would be in the context all the time.
        with self._gate:
            _lib.nng_ctx_recv(self._context[0], self._receiving)
        _lib.nng_aio_wait(self._receiving)
        check_err(_lib.nng_aio_result(self._receiving))
        return _lib.nng_aio_get_msg(self._receiving)

    def _settle(self) -> None:
        """Take back what was sent last, if it never went out."""
        # An answer may be here before nng has noted that its request went out. Were the operation
        # begun again then, nng would count it as under way for good.
        _lib.nng_aio_wait(self._sending)
        if _lib.nng_aio_result(self._sending):
            message = _lib.nng_aio_get_msg(self._sending)
            if message != _ffi.NULL:
                _lib.nng_aio_set_msg(self._sending, _ffi.NULL)
                _lib.nng_msg_free(message)


def _new_operation() -> Any:
    made = _ffi.new("nng_aio **")
    check_err(_lib.nng_aio_alloc(made, _ffi.NULL, _ffi.NULL))
    return made[0]


def _message(content: Raw) -> Any:
    """Copy content into a new message of nng's."""
    size = len(content)
    made = _ffi.new("nng_msg **")
    if _lib.nng_msg_alloc(made, size):
        raise MemoryError(f"no memory for a message of {size} bytes")
    message = made[0]
    if size < _COPY_BYTES:
        _ffi.memmove(_lib.nng_msg_body(message), bytes(content), size)
    else:
        write_into(memoryview(_ffi.buffer(_lib.nng_msg_body(message), size)), content)
    return message


def _view(message: Any) -> memoryview:
    """Return a message's memory, valid as long as a view of it lives; a copy if it is small."""
    size = _lib.nng_msg_len(message)
    buffer = _ffi.buffer(_lib.nng_msg_body(message), size)
    if size < _COPY_BYTES:
        copied = memoryview(bytearray(buffer))
        _lib.nng_msg_free(message)
        return copied
    return lend(buffer, partial(_lib.nng_msg_free, message))
