"""Requests and answers over nng: Req0 and Rep0 with contexts, on ipc, tcp and tls+tcp."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import pynng

from dmiddleware.errors import TransportError
from dmiddleware.router.transport.base import OnAnswer, Serve
from dmiddleware.router.transport.nng_context import Context, Gate
from dmiddleware.router.transport.telling import tell, tell_elsewhere
from dmiddleware.router.transport.tls import TlsFiles
from dmiddleware.router.wire.byte_pieces import Raw

__all__ = ["NngTransport", "TlsFiles"]

_logger = logging.getLogger(__name__)

_THREADS: Final = 4
"""Requests are taken by so many threads at a time; they may wait for their answers meanwhile."""

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


class NngListener:
    """A Rep0 socket; each request that waits for its answer has a context of its own."""

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
        self._gate = Gate()
        self._lock = threading.Lock()
        self._contexts: list[Context] = []
        self._idle: deque[Context] = deque()
        with _translated(f"listen on {address}"):
            self._socket = pynng.Rep0()
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
        self._threads = [
            threading.Thread(target=self._work, name=f"router-serve-{number}", daemon=True)
            for number in range(_THREADS)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def address(self) -> str:
        """Where others can dial; port 0 has become a real one."""
        return self._address

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
            # Whoever can make one request fail must not take the others' service away.
            _logger.exception("a request could not be served; its connection is closed")
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

    def answer(self, context: Context, pipe: Any, raw: Raw | None) -> None:
        """Answer the request that a context has taken."""
        if raw is None:
            # The pipe may be gone already; nng says so, and nothing is left to do.
            pynng.lib.nng_pipe_close(pipe)
        else:
            # Whoever is gone does not get its answer; it will ask again if it lives.
            with contextlib.suppress(pynng.NNGException):
                context.send(raw)
        self._idle.append(context)


class _Reply:
    """Answers one request, once."""

    __slots__ = ("_context", "_listener", "_pipe")

    def __init__(self, listener: NngListener, context: Context, pipe: Any) -> None:
        self._listener: NngListener | None = listener
        self._context = context
        self._pipe = pipe

    def __call__(self, raw: Raw | None) -> None:
        listener, self._listener = self._listener, None
        if listener is not None:
            listener.answer(self._context, self._pipe, raw)


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
        self._changed = threading.Condition()
        self._gate = Gate()
        self._idle: list[Context] = []
        self._asked: deque[tuple[Context, OnAnswer]] = deque()
        self._readers: list[threading.Thread] = []
        self._idle_readers = 0
        self._under_way = 0
        self._closed = False
        with _translated(f"dial {address}"):
            # nng itself never repeats a request: a repeated one could be taken twice.
            self._socket = pynng.Req0(resend_time=-1, recv_timeout=int(answer_s * 1000))
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
        return self._await(self._begin(raw))

    def send(self, raw: Raw, on_answer: OnAnswer) -> None:
        """Make a request without waiting; ``on_answer`` is told what became of it."""
        try:
            context = self._begin(raw)
        except TransportError as error:
            tell_elsewhere(on_answer, error)
            return
        with self._changed:
            if not self._closed:
                self._asked.append((context, on_answer))
                if len(self._asked) <= self._idle_readers:
                    self._changed.notify()
                elif len(self._asked) > 1 or threading.current_thread() not in self._readers:
                    # A reader that makes a request will wait for its answer itself.
                    self._start_reader()
                return
        self._give_back(context, reusable=False)
        tell_elsewhere(on_answer, self._closed_error())

    def close(self) -> None:
        """Close the connection; requests under way fail at once."""
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
            self._changed.wait_for(lambda: not self._under_way, _JOIN_S)
            for context in self._idle:
                context.close()

    def _start_reader(self) -> None:
        # As many as requests are under way at a time: an answer must not wait for an older one.
        name = f"router-read-{len(self._readers)}-{self._address}"
        reader = threading.Thread(target=self._read, name=name, daemon=True)
        reader.start()
        self._readers.append(reader)

    def _read(self) -> None:
        while True:
            with self._changed:
                self._idle_readers += 1
                self._changed.wait_for(lambda: self._asked or self._closed)
                self._idle_readers -= 1
                if not self._asked:
                    return
                context, on_answer = self._asked.popleft()
            try:
                answer: memoryview | TransportError = self._await(context)
            except TransportError as error:
                answer = error
            tell(on_answer, answer)

    def _begin(self, raw: Raw) -> Context:
        with _translated(f"ask {self._address}"):
            context = self._borrow()
            begun = False
            try:
                context.send(raw)
                begun = True
                return context
            finally:
                if not begun:
                    self._give_back(context, reusable=False)

    def _await(self, context: Context) -> memoryview:
        answer: memoryview | None = None
        try:
            with _translated(f"ask {self._address}"):
                answer = context.receive()
                return answer
        finally:
            # Without an answer it may still await one, which no other request may get.
            self._give_back(context, reusable=answer is not None)

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

    def _borrow(self) -> Context:
        with self._changed:
            if self._closed:
                raise self._closed_error()
            context = self._idle.pop() if self._idle else Context(self._socket, self._gate)
            self._under_way += 1
            return context

    def _closed_error(self) -> TransportError:
        return TransportError(f"the channel to {self._address} is closed")

    def _give_back(self, context: Context, *, reusable: bool) -> None:
        with self._changed:
            self._under_way -= 1
            if reusable or self._closed:
                # Once the socket closes, contexts are closed after it, and by one thread.
                self._idle.append(context)
            else:
                context.close()
            if self._closed:
                self._changed.notify_all()


def _nobody(address: str, timeout_s: float) -> TransportError:
    return TransportError(f"could not dial {address}: nobody answered within {timeout_s:g} s")


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
