"""Requests and answers over nng: Req0 and Rep0 with contexts, on ipc, tcp and tls+tcp."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import numpy as np
import pynng

from dmiddleware.errors import TransportError
from dmiddleware.router.parts import Raw, write_into
from dmiddleware.router.transport.base import Serve
from dmiddleware.router.transport.tls import TlsFiles

__all__ = ["NngTransport", "TlsFiles"]

_logger = logging.getLogger(__name__)

_BASE_WORKERS: Final = 4
_COPY_BYTES: Final = 16 * 1024
_SEND_TIMEOUT_MS: Final = 5_000
_SEND_TRY_MS: Final = 100
_JOIN_S: Final = 5.0


class NngTransport:
    """nng's request and reply sockets.

    Args:
        tls: certificates for ``tls+tcp`` addresses; None: such addresses are refused.
    """

    def __init__(self, *, tls: TlsFiles | None = None) -> None:
        self._tls = tls

    def listen(
        self, address: str, serve: Serve, *, on_gone: Callable[[int], None], max_frame_bytes: int
    ) -> NngListener:
        """Listen on an address; see :class:`~dmiddleware.router.transport.base.Transport`."""
        return NngListener(
            address,
            serve,
            on_gone=on_gone,
            max_frame_bytes=max_frame_bytes,
            tls=self._tls_for(address),
        )

    def dial(
        self, address: str, *, connect_s: float, answer_s: float, max_frame_bytes: int
    ) -> NngChannel:
        """Connect to an address; see :class:`~dmiddleware.router.transport.base.Transport`."""
        return NngChannel(
            address,
            connect_s=connect_s,
            answer_s=answer_s,
            max_frame_bytes=max_frame_bytes,
            tls=self._tls_for(address),
        )

    def covers_body(self, address: str) -> bool:
        """Tell whether frames need all their bytes signed: on bare tcp only."""
        return address.startswith("tcp://")

    def lay_down(self, arrays: Sequence[memoryview]) -> None:
        """Tell that arrays have no place of their own here."""

    def _tls_for(self, address: str) -> TlsFiles | None:
        if not address.startswith("tls+tcp://"):
            return None
        if self._tls is None:
            raise TransportError(f"{address} needs certificates; give TlsFiles to the transport")
        return self._tls


class _Gate:
    """Lets threads send until it is closed, which waits for those that are at it.

    nng aborts the process when a context sends while its socket closes.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._inside = 0
        self._closed = False

    def __enter__(self) -> None:
        with self._changed:
            if self._closed:
                raise pynng.Closed("Object closed", 7)
            self._inside += 1

    def __exit__(self, *error: object) -> None:
        with self._changed:
            self._inside -= 1
            if not self._inside:
                self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.wait_for(lambda: not self._inside, _JOIN_S)


class NngListener:
    """A Rep0 socket, served by threads with a context each."""

    def __init__(
        self,
        address: str,
        serve: Serve,
        *,
        on_gone: Callable[[int], None],
        max_frame_bytes: int,
        tls: TlsFiles | None,
    ) -> None:
        self._serve = serve
        self._closed = False
        self._threads: list[threading.Thread] = []
        self._sending = _Gate()
        self._contexts: list[pynng.Context] = []
        with _translated(f"listen on {address}"):
            self._socket = pynng.Rep0(send_timeout=_SEND_TIMEOUT_MS)
            try:
                _bound(self._socket, max_frame_bytes)
                if tls is not None:
                    self._socket.tls_config = tls.config(listens=True)
                # The callback runs on nng's thread: it may only take note.
                self._socket.add_post_pipe_remove_cb(lambda pipe: on_gone(pipe.id))
                listener = self._socket.listen(address)
            except BaseException:
                self._socket.close()
                raise
        self._address = _real_address(address, listener)
        self.grow(_BASE_WORKERS)

    @property
    def address(self) -> str:
        """Where others can dial; port 0 has become a real one."""
        return self._address

    def grow(self, workers: int) -> None:
        """Serve at least so many requests at a time."""
        while len(self._threads) < workers and not self._closed:
            name = f"router-serve-{len(self._threads)}"
            thread = threading.Thread(target=self._work, name=name, daemon=True)
            self._threads.append(thread)
            thread.start()

    def close(self) -> None:
        """Stop listening and end the threads."""
        if self._closed:
            return
        self._closed = True
        self._sending.close()
        self._socket.close()
        for thread in self._threads:
            thread.join(_JOIN_S)
        _close_contexts(self._contexts)

    def _work(self) -> None:
        with contextlib.suppress(pynng.Closed):
            context = self._socket.new_context()
            self._contexts.append(context)
            while not self._closed:
                self._serve_one(context)

    def _serve_one(self, context: pynng.Context) -> None:
        message = context.recv_msg()
        pipe = message.pipe
        connection = 0 if pipe is None else pipe.id
        try:
            answer = self._serve(_view(message), connection)
        except Exception:
            # Whoever can make one request fail must not take the others' service away.
            _logger.exception("a request could not be served; its connection is closed")
            answer = None
        if answer is None:
            # The pipe may be gone already, and nng then knows it no more.
            with contextlib.suppress(pynng.NNGException):
                if pipe is not None:
                    pipe.close()
            return
        try:
            with self._sending:
                context.send_msg(_message(answer))
        except pynng.Closed:
            raise
        except pynng.NNGException as error:
            # The dialer is gone or does not read; it will ask again if it lives.
            _logger.debug("an answer could not be sent: %s", error)


class NngChannel:
    """A Req0 socket; each request under way has a context of its own."""

    def __init__(
        self,
        address: str,
        *,
        connect_s: float,
        answer_s: float,
        max_frame_bytes: int,
        tls: TlsFiles | None,
    ) -> None:
        self._address = address
        self._unused = threading.Condition()
        self._sending = _Gate()
        self._idle: list[pynng.Context] = []
        self._under_way = 0
        self._closed = False
        with _translated(f"dial {address}"):
            # nng itself never repeats a request: a repeated one could be taken twice.
            deadline_ms = int(answer_s * 1000)
            self._tries = max(1, deadline_ms // _SEND_TRY_MS)
            self._socket = pynng.Req0(
                resend_time=-1, send_timeout=_SEND_TRY_MS, recv_timeout=deadline_ms
            )
            try:
                _bound(self._socket, max_frame_bytes)
                if tls is None:
                    self._connect(address, connect_s)
                else:
                    self._connect_secured(address, connect_s, tls)
            except BaseException:
                self._socket.close()
                raise

    def request(self, raw: Raw) -> memoryview:
        """Make a request and wait for its answer."""
        with _translated(f"ask {self._address}"):
            context = self._borrow()
            answer: memoryview | None = None
            try:
                self._send(context, _message(raw))
                answer = _view(context.recv_msg())
                return answer
            finally:
                self._give_back(context, reusable=answer is not None)

    def close(self) -> None:
        """Close the connection; requests under way fail at once."""
        with self._unused:
            if self._closed:
                return
            self._closed = True
            self._sending.close()
            self._socket.close()
            self._unused.wait_for(lambda: not self._under_way, _JOIN_S)
            _close_contexts(self._idle)

    def _send(self, context: pynng.Context, message: pynng.Message) -> None:
        # While nobody is connected a request waits to be sent. It does so in short tries, since
        # closing the channel has to wait for whoever is in one.
        for left in reversed(range(self._tries)):
            try:
                with self._sending:
                    context.send_msg(message)
                return
            except pynng.Timeout:
                # nng has given the message back, which pynng does not know and would never free.
                message._mem_freed = False
                if not left:
                    raise

    def _connect(self, address: str, timeout_s: float) -> None:
        # A blocking dial has no deadline: where packets vanish it would last for minutes.
        connected = threading.Event()
        self._socket.add_post_pipe_connect_cb(lambda _: connected.set())
        self._socket.dial(address, block=False)
        if not connected.wait(timeout_s):
            raise _nobody(address, timeout_s)

    def _connect_secured(self, address: str, timeout_s: float, tls: TlsFiles) -> None:
        # Only a blocking dial tells that certificates do not fit; closing the socket ends it.
        self._socket.tls_config = tls.config(listens=False)
        failures: list[pynng.NNGException] = []

        def dial() -> None:
            try:
                self._socket.dial(address, block=True)
            except pynng.NNGException as error:
                failures.append(error)

        dialing = threading.Thread(target=dial, name=f"router-secure-{address}", daemon=True)
        dialing.start()
        dialing.join(timeout_s)
        if dialing.is_alive():
            raise _nobody(address, timeout_s)
        if failures:
            if isinstance(failures[0], pynng.CryptoError):
                tls.check(address, timeout_s=timeout_s / 2)
            raise failures[0]

    def _borrow(self) -> pynng.Context:
        with self._unused:
            if self._closed:
                raise TransportError(f"the channel to {self._address} is closed")
            context = self._idle.pop() if self._idle else self._socket.new_context()
            self._under_way += 1
            return context

    def _give_back(self, context: pynng.Context, *, reusable: bool) -> None:
        with self._unused:
            self._under_way -= 1
            if reusable or self._closed:
                self._idle.append(context)
            else:
                # It may still await its answer, which no other request may get.
                context.close()
            self._unused.notify_all()


def _nobody(address: str, timeout_s: float) -> TransportError:
    return TransportError(f"could not dial {address}: nobody answered within {timeout_s:g} s")


def _close_contexts(contexts: list[pynng.Context]) -> None:
    """Close contexts after their socket, when no thread uses them.

    nng has closed them with the socket, and aborts the process if both happen at once; pynng must
    be told, or it tries again when they are collected.
    """
    for context in contexts:
        with contextlib.suppress(pynng.Closed):
            context.close()
    contexts.clear()


def _message(content: Raw) -> pynng.Message:
    """Copy content into a message of nng's; if it is large, each byte once."""
    size = len(content)
    if size < _COPY_BYTES:
        return pynng.Message(bytes(content))
    made = pynng.ffi.new("nng_msg **")
    if pynng.lib.nng_msg_alloc(made, size):
        raise MemoryError(f"no memory for a message of {size} bytes")
    message = pynng.Message(made[0])  # owns it from here on
    write_into(memoryview(pynng.ffi.buffer(pynng.lib.nng_msg_body(made[0]), size)), content)
    return message


class _Owner(np.ndarray):
    """A view of a message's memory that keeps the message alive."""

    message: pynng.Message


def _view(message: pynng.Message) -> memoryview:
    """Return a message's memory, valid as long as a view of it lives; a copy if it is small."""
    buffer = message._buffer  # documented by pynng, underscore and all
    if len(buffer) < _COPY_BYTES:
        return memoryview(bytearray(buffer))
    owner = np.frombuffer(buffer, np.uint8).view(_Owner)
    owner.message = message
    return owner.data


def _bound(socket: pynng.Socket, max_frame_bytes: int) -> None:
    socket.recv_max_size = max_frame_bytes
    if socket.recv_max_size != max_frame_bytes:
        raise TransportError(
            f"nng did not take the bound of {max_frame_bytes} bytes, it says {socket.recv_max_size}"
        )


def _real_address(address: str, listener: Any) -> str:
    if not address.endswith(":0"):
        return address
    local = str(listener.local_address)
    return f"{address[:-2]}:{local.rpartition(':')[2]}"


@contextlib.contextmanager
def _translated(doing: str) -> Iterator[None]:
    """Turn nng's errors into the router's."""
    try:
        yield
    except pynng.Timeout as error:
        raise TransportError(f"could not {doing}: no answer in time") from error
    except pynng.NNGException as error:
        raise TransportError(f"could not {doing}: {error}") from error
