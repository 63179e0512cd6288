"""Requests and replies over nng: Req0 and Rep0 with contexts, on ipc, tcp and tls+tcp.

pynng's own contexts block while sending, and take about sixteen calls for a request and its reply.
:class:`Context` uses nng's functions directly, which pynng exposes, and reuses what it can.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Final

import pynng
from pynng.exceptions import check_err

from dmiddleware.errors import TransportError
from dmiddleware.router.transport.callbacks import run_callback, run_callback_in_thread
from dmiddleware.router.transport.interface import ListenLimits, OnReply, RequestHandler
from dmiddleware.router.transport.tls import TlsFiles
from dmiddleware.router.wire.arrays import view_with_release
from dmiddleware.router.wire.byte_pieces import WireBytes, write_into

__all__ = ["NngTransport", "TlsFiles"]

_logger = logging.getLogger(__name__)

_THREADS: Final = 4
"""How many threads accept requests; any number of requests may wait for their replies."""

_JOIN_S: Final = 5.0


class NngTransport:
    """nng's request and reply sockets.

    Args:
        tls: certificates for ``tls+tcp`` addresses; None: such addresses are refused.
    """

    def __init__(self, *, tls: TlsFiles | None = None) -> None:
        self._tls = tls

    def listen(
        self,
        address: str,
        serve: RequestHandler,
        *,
        on_disconnect: Callable[[int], None],
        limits: ListenLimits,
    ) -> NngListener:
        """Listen on an address; see :class:`~dmiddleware.router.transport.interface.Transport`."""
        return NngListener(
            address,
            serve,
            on_disconnect=on_disconnect,
            limits=limits,
            tls=self._tls_for(address),
        )

    def dial(
        self,
        address: str,
        *,
        connect_timeout_s: float,
        reply_timeout_s: float,
        max_frame_bytes: int,
    ) -> NngChannel:
        """Connect to an address; see :class:`~dmiddleware.router.transport.interface.Transport`."""
        return NngChannel(
            address,
            connect_timeout_s=connect_timeout_s,
            reply_timeout_s=reply_timeout_s,
            max_frame_bytes=max_frame_bytes,
            tls=self._tls_for(address),
        )

    def covers_body(self, address: str) -> bool:
        """Return whether frames need a MAC over all their bytes: on plain tcp only."""
        return address.startswith("tcp://")

    def stage_arrays(self, arrays: Sequence[memoryview]) -> None:
        """Return None: arrays cannot be staged."""

    def _tls_for(self, address: str) -> TlsFiles | None:
        if not address.startswith("tls+tcp://"):
            return None
        if self._tls is None:
            raise TransportError(
                f"{address} needs certificates; pass tls=TlsFiles(…) to the transport"
            )
        return self._tls


class NngListener:
    """A Rep0 socket with one context for each request that waits for its reply."""

    def __init__(
        self,
        address: str,
        serve: RequestHandler,
        *,
        on_disconnect: Callable[[int], None],
        limits: ListenLimits,
        tls: TlsFiles | None,
    ) -> None:
        self._serve = serve
        self._closed = False
        self._gate = Gate()
        self._lock = threading.Lock()
        self._contexts: list[Context] = []
        self._idle: deque[Context] = deque()
        with _translated(f"listen on {address}"):
            self._socket = pynng.Rep0()
            try:
                _bound(self._socket, limits.max_frame_bytes)
                if tls is not None:
                    self._socket.tls_config = tls.config(listens=True)
                # The callback runs on nng's thread, and must return at once.
                self._socket.add_post_pipe_remove_cb(lambda pipe: on_disconnect(pipe.id))
                listener = self._socket.listen(address)
            except BaseException:
                self._socket.close()
                raise
        self._address = _real_address(address, listener)
        self._threads = [
            threading.Thread(target=self._work, name=f"router-serve-{number}", daemon=True)
            for number in range(_THREADS)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def address(self) -> str:
        """Where others can dial; port 0 is replaced by the real one."""
        return self._address

    def trust(self, connection: int) -> None:
        """Lift the limits of a connection whose peer has authenticated."""

    def close(self) -> None:
        """Stop listening and end the threads."""
        if self._closed:
            return
        self._closed = True
        self._gate.close()
        self._socket.close()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(_JOIN_S)
        for context in self._contexts:
            context.close()

    def _work(self) -> None:
        with contextlib.suppress(pynng.Closed):
            while not self._closed:
                self._serve_one(self._free_context())

    def _serve_one(self, context: Context) -> None:
        raw, pipe = context.receive_with_pipe()
        reply = _Reply(self, context, pipe)
        try:
            self._serve(raw, pynng.lib.nng_pipe_id(pipe), reply)
        except Exception:
            # A request that makes the handler fail must not affect other requests.
            _logger.exception("closed a connection, handling its request failed")
            reply(None)

    def _free_context(self) -> Context:
        with self._lock:
            for _ in range(len(self._idle)):
                context = self._idle.popleft()
                if not context.is_sending:
                    return context
                self._idle.append(context)
            context = Context(self._socket, self._gate)
            self._contexts.append(context)
            return context

    def answer(self, context: Context, pipe: Any, raw: WireBytes | None) -> None:
        """Reply to the request that a context has received."""
        if raw is None:
            # If the pipe is already closed, nng reports that and nothing is left to do.
            pynng.lib.nng_pipe_close(pipe)
        else:
            # If the dialer is dead, the reply is dropped; a live one sends the request again.
            with contextlib.suppress(pynng.NNGException):
                context.send(raw)
        self._idle.append(context)


class _Reply:
    """Replies to one request, once."""

    __slots__ = ("_context", "_listener", "_pipe")

    def __init__(self, listener: NngListener, context: Context, pipe: Any) -> None:
        self._listener: NngListener | None = listener
        self._context = context
        self._pipe = pipe

    def __call__(self, raw: WireBytes | None, *, urgent: bool = False) -> None:
        listener, self._listener = self._listener, None
        if listener is not None:
            listener.answer(self._context, self._pipe, raw)


class NngChannel:
    """A Req0 socket with one context for each pending request."""

    def __init__(
        self,
        address: str,
        *,
        connect_timeout_s: float,
        reply_timeout_s: float,
        max_frame_bytes: int,
        tls: TlsFiles | None,
    ) -> None:
        self._address = address
        self._reply_timeout_s = reply_timeout_s
        self._changed = threading.Condition()
        self._gate = Gate()
        self._idle: list[Context] = []
        self._sent: deque[tuple[Context, OnReply, float | None]] = deque()
        self._readers: list[threading.Thread] = []
        self._idle_readers = 0
        self._n_pending = 0
        self._closed = False
        with _translated(f"dial {address}"):
            # nng must not resend requests, because the listener could process one twice.
            self._socket = pynng.Req0(resend_time=-1)
            try:
                _bound(self._socket, max_frame_bytes)
                if tls is None:
                    self._connect(address, connect_timeout_s)
                else:
                    self._connect_secured(address, connect_timeout_s, tls)
            except BaseException:
                self._socket.close()
                raise

    def request(self, raw: WireBytes) -> memoryview:
        """Make a request and wait for the reply."""
        return self._await(self._begin(raw), self._reply_timeout_s)

    def send(
        self,
        raw: WireBytes,
        on_reply: OnReply,
        *,
        timeout_s: float | None,
        urgent: bool = False,
    ) -> None:
        """Make a request without waiting; ``on_reply`` is called with the outcome."""
        try:
            context = self._begin(raw)
        except TransportError as error:
            run_callback_in_thread(on_reply, error)
            return
        with self._changed:
            if not self._closed:
                self._sent.append((context, on_reply, timeout_s))
                if len(self._sent) <= self._idle_readers:
                    self._changed.notify()
                elif len(self._sent) > 1 or threading.current_thread() not in self._readers:
                    # A reader thread that makes a request waits for the reply itself.
                    self._start_reader()
                return
        self._give_back(context, reusable=False)
        run_callback_in_thread(on_reply, self._closed_error())

    def close(self) -> None:
        """Close the connection; pending requests fail at once."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._changed.notify_all()
            readers = list(self._readers)
        self._gate.close()
        self._socket.close()
        for reader in readers:
            if reader is not threading.current_thread():
                reader.join(_JOIN_S)
        with self._changed:
            self._changed.wait_for(lambda: not self._n_pending, _JOIN_S)
            for context in self._idle:
                context.close()

    def _start_reader(self) -> None:
        # As many as there are pending requests: no reply may wait for an older one.
        name = f"router-read-{len(self._readers)}-{self._address}"
        reader = threading.Thread(target=self._read, name=name, daemon=True)
        reader.start()
        self._readers.append(reader)

    def _read(self) -> None:
        while True:
            with self._changed:
                self._idle_readers += 1
                self._changed.wait_for(lambda: self._sent or self._closed)
                self._idle_readers -= 1
                if not self._sent:
                    return
                context, on_reply, timeout_s = self._sent.popleft()
            try:
                answer: memoryview | TransportError = self._await(context, timeout_s)
            except TransportError as error:
                answer = error
            run_callback(on_reply, answer)

    def _begin(self, raw: WireBytes) -> Context:
        with _translated(f"send a request to {self._address}"):
            context = self._borrow()
            sent = False
            try:
                context.send(raw)
                sent = True
                return context
            finally:
                if not sent:
                    self._give_back(context, reusable=False)

    def _await(self, context: Context, timeout_s: float | None) -> memoryview:
        answer: memoryview | None = None
        try:
            with _translated(f"send a request to {self._address}"):
                answer = context.receive(timeout_s)
                return answer
        finally:
            # Without a reply the context may still receive one, meant for no other request.
            self._give_back(context, reusable=answer is not None)

    def _connect(self, address: str, timeout_s: float) -> None:
        # A blocking dial has no deadline, and lasts minutes if packets are dropped.
        connected = threading.Event()
        self._socket.add_post_pipe_connect_cb(lambda _: connected.set())
        self._socket.dial(address, block=False)
        if not connected.wait(timeout_s):
            raise _no_connection(address, timeout_s)

    def _connect_secured(self, address: str, timeout_s: float, tls: TlsFiles) -> None:
        # Only a blocking dial reports bad certificates; closing the socket ends it.
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
            raise _no_connection(address, timeout_s)
        if failures:
            if isinstance(failures[0], pynng.CryptoError):
                tls.check(address, timeout_s=timeout_s / 2)
            raise failures[0]

    def _borrow(self) -> Context:
        with self._changed:
            if self._closed:
                raise self._closed_error()
            context = self._idle.pop() if self._idle else Context(self._socket, self._gate)
            self._n_pending += 1
            return context

    def _closed_error(self) -> TransportError:
        return TransportError(f"the channel to {self._address} is closed")

    def _give_back(self, context: Context, *, reusable: bool) -> None:
        with self._changed:
            self._n_pending -= 1
            if reusable or self._closed:
                # Once the socket is closed, one thread closes all contexts.
                self._idle.append(context)
            else:
                context.close()
            if self._closed:
                self._changed.notify_all()


def _no_connection(address: str, timeout_s: float) -> TransportError:
    return TransportError(
        f"could not dial {address}: no connection within {timeout_s:g} s; check the address, and "
        "that the peer is running"
    )


def _bound(socket: pynng.Socket, max_frame_bytes: int) -> None:
    socket.recv_max_size = max_frame_bytes
    if socket.recv_max_size != max_frame_bytes:
        raise TransportError(
            f"nng limits frames to {socket.recv_max_size} bytes instead of {max_frame_bytes}; "
            "choose another max_frame_bytes"
        )


def _real_address(address: str, listener: Any) -> str:
    if not address.endswith(":0"):
        return address
    local = str(listener.local_address)
    return f"{address[:-2]}:{local.rpartition(':')[2]}"


@contextlib.contextmanager
def _translated(doing: str) -> Iterator[None]:
    """Raise nng's errors as transport errors."""
    try:
        yield
    except pynng.Timeout as error:
        raise TransportError(f"could not {doing}: no reply in time") from error
    except pynng.NNGException as error:
        raise TransportError(f"could not {doing}: {error}") from error


_COPY_BYTES: Final = 16 * 1024
"""Shorter messages are copied and freed at once."""

_ffi, _lib = pynng.ffi, pynng.lib


class Gate:
    """Lets threads use a socket until it is closed; closing waits for the threads inside.

    nng 1.11 aborts the process if one thread uses a context while another closes its socket.
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
        """Admit no more threads, and wait until those inside have left."""
        with self._changed:
            self._closed = True
            self._changed.wait_for(lambda: not self._inside, _JOIN_S)


class Context:
    """A context of a Req0 or Rep0 socket, used by one thread at a time.

    Args:
        socket: the socket.
        gate: the socket's gate.

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
        """Whether the last message is still being sent."""
        return bool(_lib.nng_aio_busy(self._sending))

    def send(self, content: WireBytes) -> None:
        """Start sending a message, without waiting until it is sent.

        Each byte of a large message is copied once.
        """
        # All of it inside the gate: otherwise closing the listener may free the operation.
        with self._gate:
            self._settle()
            _lib.nng_aio_set_msg(self._sending, _message(content))
            _lib.nng_ctx_send(self._context[0], self._sending)

    def receive(self, timeout_s: float | None) -> memoryview:
        """Wait for a message, at most ``timeout_s`` unless None.

        Returns:
            Its bytes, valid while a view of them is alive.

        Raises:
            NNGException: if none arrived in time, or the socket was closed.
        """
        return _view(self._receive(timeout_s))

    def receive_with_pipe(self) -> tuple[memoryview, Any]:
        """Wait for a message; return it and the pipe that it arrived on."""
        message = self._receive(None)
        pipe = _lib.nng_msg_get_pipe(message)
        return _view(message), pipe

    def close(self) -> None:
        """Close the context; may be called twice.

        No other thread may close the socket at the same time, or nng aborts the process.
        """
        if self._closed:
            return
        self._closed = True
        # If the socket is closed, nng has already closed the context.
        _lib.nng_ctx_close(self._context[0])
        self._settle()
        _lib.nng_aio_free(self._sending)
        _lib.nng_aio_free(self._receiving)

    def _receive(self, timeout_s: float | None) -> Any:
        _lib.nng_aio_set_timeout(self._receiving, -1 if timeout_s is None else int(timeout_s * 1e3))
        # Waiting is a separate call: nng_ctx_recvmsg would use the context all the time.
        with self._gate:
            _lib.nng_ctx_recv(self._context[0], self._receiving)
        _lib.nng_aio_wait(self._receiving)
        check_err(_lib.nng_aio_result(self._receiving))
        return _lib.nng_aio_get_msg(self._receiving)

    def _settle(self) -> None:
        """Free the last message if it was never sent."""
        # A reply may arrive before nng has recorded that its request was sent. If the operation
        # were reused before that, nng would consider it pending forever.
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


def _message(content: WireBytes) -> Any:
    """Copy content into a new nng message."""
    size = len(content)
    made = _ffi.new("nng_msg **")
    if _lib.nng_msg_alloc(made, size):
        raise MemoryError(f"could not allocate {size} bytes for a message")
    message = made[0]
    if size < _COPY_BYTES:
        _ffi.memmove(_lib.nng_msg_body(message), bytes(content), size)
    else:
        write_into(memoryview(_ffi.buffer(_lib.nng_msg_body(message), size)), content)
    return message


def _view(message: Any) -> memoryview:
    """Return a message's memory, valid while a view of it is alive; a copy if it is small."""
    size = _lib.nng_msg_len(message)
    buffer = _ffi.buffer(_lib.nng_msg_body(message), size)
    if size < _COPY_BYTES:
        copied = memoryview(bytearray(buffer))
        _lib.nng_msg_free(message)
        return copied
    return view_with_release(buffer, partial(_lib.nng_msg_free, message))
