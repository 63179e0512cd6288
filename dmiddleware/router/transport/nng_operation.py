"""Operations of nng.

nng calls back on threads of its own, which need the GIL and must not wait. Such a callback only
adds a call to the thread of the transport.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from dmiddleware.errors import TransportError
from dmiddleware.router.transport.nng_library import ffi, lib

__all__ = ["MAX_PIECES", "Operation", "failure", "text_of"]

MAX_PIECES: Final = 8
"""The most buffers of one operation."""


def text_of(code: int) -> str:
    """Return what nng calls an error."""
    text: str = ffi.string(lib.nng_strerror(code)).decode()
    return text.lower()


def failure(doing: str, code: int) -> TransportError:
    """Return the error for a result of nng that is not zero."""
    return TransportError(f"could not {doing}: {text_of(code)}")


def _complete(handle: Any) -> None:
    ffi.from_handle(handle)()


_COMPLETE: Final = ffi.callback("void(void *)", _complete)


class Operation:
    """One operation at a time, which nng performs in the background.

    Args:
        on_done: called on one of nng's threads when an operation has ended; it must return at
            once.
    """

    __slots__ = ("_buffers", "_handle", "_iov", "aio")

    def __init__(self, on_done: Callable[[], None]) -> None:
        # nng keeps only the address of the handle, so it must stay alive here.
        self._handle = ffi.new_handle(on_done)
        made = ffi.new("nng_aio **")
        code = lib.nng_aio_alloc(made, _COMPLETE, self._handle)
        if code:
            raise failure("allocate an operation", code)
        self.aio = made[0]
        self._iov: Any = None
        self._buffers: list[Any] = []

    def use(self, pieces: Sequence[bytes | bytearray | memoryview]) -> Any:
        """Set what the next operation sends, or where it receives; return nng's operation.

        The memory stays valid until the next call, or until :meth:`forget`.
        """
        if self._iov is None:
            self._iov = ffi.new("nng_iov[]", MAX_PIECES)
        iov, buffers = self._iov, [ffi.from_buffer(piece) for piece in pieces]
        for index, buffer in enumerate(buffers):
            entry = iov[index]
            entry.iov_buf, entry.iov_len = buffer, len(buffer)
        lib.nng_aio_set_iov(self.aio, len(buffers), iov)
        self._buffers = buffers
        return self.aio

    def forget(self) -> None:
        """Release the memory of the last operation, which has ended."""
        self._buffers = []

    @property
    def result(self) -> int:
        """The result of the last operation; zero if it succeeded."""
        code: int = lib.nng_aio_result(self.aio)
        return code

    @property
    def count(self) -> int:
        """How many bytes it has moved."""
        n_bytes: int = lib.nng_aio_count(self.aio)
        return n_bytes

    def output(self) -> Any:
        """Return what it has made."""
        return lib.nng_aio_get_output(self.aio, 0)

    def free(self) -> None:
        """Free it when none is pending; wait until its callback has returned."""
        lib.nng_aio_stop(self.aio)
        lib.nng_aio_free(self.aio)
        self.forget()
