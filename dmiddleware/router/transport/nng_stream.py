"""Streams over nng's byte streams: ``ipc``, ``tcp`` and ``tls+tcp``.

nng owns the sockets, the polling and TLS. Here are only the operations that it performs: one
receives and one sends for each connection, one accepts for each listener.

These facts about nng 1.11 shape the code:

- An operation moves at most eight buffers, and often fewer bytes than it was asked to.
- An operation that is canceled may end later. If it is stopped before that, nng takes this for its
  end, and uses it after it was freed; nng's own dialer does so when a dial is canceled. So no
  operation that has a callback is canceled. Its connection, dialer or listener is closed, which
  ends it, and freed when its completion has been processed.
- If nng cannot send over TLS because the peer has died, it closes its socket and fails the pending
  operations. One that starts to receive after that never ends, and later ones that send seem to
  succeed. So whenever one starts to receive, the socket is asked for its peer.
- Closing a websocket, or its listener, does not always end the pending operations. So ``ws`` is not
  offered.
- A timeout of nng may expire while another thread closes the connection, and abort the process.
  None is used.
- After a fork, nng aborts the process.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from functools import partial
from typing import Any, Final

from dmiddleware.errors import RouterError, TransportError
from dmiddleware.router.transport.base_stream import IPC, BaseListener, BaseStream
from dmiddleware.router.transport.io_thread import IoThread, fork_error
from dmiddleware.router.transport.nng_library import ffi, lib
from dmiddleware.router.transport.nng_operation import (
    MAX_PIECES,
    Operation,
    failure,
    text_of,
)
from dmiddleware.router.transport.stream import OnBytes, OnConnection, OnSent, Piece
from dmiddleware.router.transport.tls import TlsFiles

__all__ = ["NngStream", "NngStreamListener", "NngStreamTransport"]

_TCP: Final = "tcp://"
_TLS: Final = "tls+tcp://"

_CHECK_S: Final = 1.0
"""How long the search for the reason of a failed TLS handshake may wait for the peer."""

_GONE_S: Final = 0.1
"""How long receiving may take once the socket has no peer; what has arrived comes at once."""

_NO_DELAY: Final = b"tcp-nodelay"
"""Otherwise the second of two short frames may wait until the first one is acknowledged."""

_PEER: Final = b"remote-address"

_JOINED: Final = 16 * 1024
"""Neighboring pieces that are shorter are sent as one."""

_ENDED: Final = frozenset({lib.NNG_ECLOSED, lib.NNG_ECONNSHUT, lib.NNG_ECONNRESET})


class NngStreamTransport:
    """Connections over nng.

    Args:
        tls: certificates for ``tls+tcp`` addresses; None: such addresses are refused.
    """

    def __init__(self, *, tls: TlsFiles | None = None) -> None:
        self._tls = tls
        self._thread = IoThread()

    def dial(self, address: str, *, timeout_s: float) -> NngStream:
        """Connect to an address; see :class:`~dmiddleware.router.transport.stream.Transport`."""
        self._check(address, "dial")
        made = ffi.new("nng_stream_dialer **")
        _check_code(f"dial {address}", lib.nng_stream_dialer_alloc(made, address.encode()))
        dialer = made[0]
        try:
            if not address.startswith(IPC):
                code = lib.nng_stream_dialer_set_bool(dialer, _NO_DELAY, True)
                _check_code(f"dial {address}", code)
            if address.startswith(_TLS):
                config = self._config(address, listens=False)
                code = lib.nng_stream_dialer_set_ptr(dialer, b"tls-config", config)
                _check_code(f"dial {address}", code)
            stream = NngStream(address, self._thread)
        except BaseException:
            lib.nng_stream_dialer_free(dialer)
            raise
        stream.connect(dialer, timeout_s, self._tls if address.startswith(_TLS) else None)
        return stream

    def listen(self, address: str, on_connection: OnConnection) -> NngStreamListener:
        """Listen on an address; see :class:`~dmiddleware.router.transport.stream.Transport`."""
        self._check(address, "listen on")
        config = self._config(address, listens=True) if address.startswith(_TLS) else None
        return NngStreamListener(address, on_connection, self._thread, config)

    def close(self, *, timeout_s: float) -> bool:
        """Close everything; see :class:`~dmiddleware.router.transport.stream.Transport`."""
        return self._thread.is_forked or self._thread.close_users(timeout_s)

    def _check(self, address: str, doing: str) -> None:
        if self._thread.is_forked:
            raise fork_error()
        is_valid = address.startswith((f"{IPC}/", _TCP, _TLS)) and "\0" not in address
        if not is_valid:
            raise TransportError(
                f"could not {doing} {address!r}: write ipc:///path, tcp://host:port or "
                "tls+tcp://host:port"
            )

    def _config(self, address: str, *, listens: bool) -> Any:
        if self._tls is None:
            raise TransportError(
                f"{address} needs certificates; pass tls=TlsFiles(…) to the transport"
            )
        return self._tls.config(listens=listens)


class NngStream(BaseStream):
    """A connection of nng.

    Its operations live until all their completions have been processed. Completions are processed
    on one thread, most of them with ``_lock`` held.
    """

    def __init__(self, address: str, thread: IoThread, connection: Any = None) -> None:
        super().__init__(address, thread, is_connected=connection is not None)
        self._connection = connection
        self._dialer: Any = None
        self._dialing: Operation | None = None
        # The certificates of a dialer, until the peer has sent something.
        self._tls: TlsFiles | None = None
        self._receiving = Operation(partial(thread.call, self._on_received))
        self._sending = Operation(partial(thread.call, self._on_sent_some))
        self._n_receives = 0
        # How many operations have not called back yet.
        self._n_pending = 0
        thread.add_user(self)

    def send(self, pieces: Sequence[Piece], on_sent: OnSent) -> bool:
        """Send bytes; return whether the system has accepted all of them."""
        return super().send(_joined(pieces), on_sent)

    def connect(self, dialer: Any, timeout_s: float, tls: TlsFiles | None) -> None:
        """Start to connect; called once, by the transport."""
        self._dialer, self._tls = dialer, tls
        self._dialing = Operation(partial(self._thread.call, self._on_dialed))
        self._n_pending += 1
        lib.nng_stream_dialer_dial(dialer, self._dialing.aio)
        self._thread.call_at(time.monotonic() + timeout_s, partial(self._on_late, timeout_s))

    def _on_late(self, timeout_s: float) -> None:
        with self._lock:
            if self._connection is None:
                self._end(self._dial_error(f"no connection within {timeout_s:g} s"))

    def _on_dialed(self) -> None:
        assert self._dialing is not None
        code = self._dialing.result
        with self._lock:
            lib.nng_stream_dialer_close(self._dialer)
            lib.nng_stream_dialer_free(self._dialer)
            self._dialer = None
            self._n_pending -= 1
            if code:
                self._end(self._dial_error(text_of(code)))
            else:
                self._connection = self._dialing.output()
                if self._error is None:
                    self._is_connected = True
                    self._start_waiting()
                else:
                    # It was closed, or late, just before nng had connected.
                    lib.nng_stream_close(self._connection)
            self._release_if_done()

    def _start_waiting(self) -> None:
        """Start what has waited for the connection."""
        if self._on_bytes is not None:
            self._start_receiving()
        if self._on_sent is not None:
            self._send()

    def _start_receiving(self) -> None:
        self._n_pending += 1
        lib.nng_stream_recv(self._connection, self._receiving.use(self._targets))
        self._n_receives += 1
        if self._address.startswith(_TLS) and not self._has_peer():
            self._thread.call_at(
                time.monotonic() + _GONE_S, partial(self._end_if_receiving, self._n_receives)
            )

    def _has_peer(self) -> bool:
        return not lib.nng_stream_get_addr(self._connection, _PEER, ffi.new("nng_sockaddr *"))

    def _end_if_receiving(self, number: int) -> None:
        with self._lock:
            if self._on_bytes is not None and self._n_receives == number:
                self._end(self._error_of(lib.NNG_ECONNSHUT))

    def _on_received(self) -> None:
        receiving = self._receiving
        with self._lock:
            code, on_bytes = receiving.result, self._on_bytes
            outcome: int | RouterError | None = receiving.count
            receiving.forget()
            self._targets, self._on_bytes = (), None
            tls, self._tls = self._tls, None
            if code:
                self._end(self._error_of(code))
                outcome = self._error
            self._n_pending -= 1
            self._release_if_done()
        assert on_bytes is not None and outcome is not None
        if code == lib.NNG_ECRYPTO and tls is not None:
            threading.Thread(
                target=self._explain, args=(tls, on_bytes, outcome), daemon=True
            ).start()
            return
        self._guarded(partial(on_bytes, outcome))

    def _explain(self, tls: TlsFiles, on_bytes: OnBytes, error: RouterError) -> None:
        """Find out why TLS has failed, and report it; runs in a thread, because it may wait."""
        try:
            tls.check(self._address, timeout_s=_CHECK_S)
        except RouterError as reason:
            error = reason
        self._report(partial(on_bytes, error))

    def _send(self) -> bool:
        self._n_pending += 1
        pieces = self._unsent[:MAX_PIECES]
        lib.nng_stream_send(self._connection, self._sending.use(pieces))
        return False

    def _on_sent_some(self) -> None:
        sending, outcome = self._sending, None
        with self._lock:
            self._n_pending -= 1
            code, on_sent = sending.result, self._on_sent
            n_bytes = sending.count
            sending.forget()
            if code:
                self._end(self._error_of(code))
            else:
                self._drop_sent(n_bytes)
            # If everything was sent, it has not failed, though the connection may have ended since.
            if self._unsent:
                if self._error is None:
                    self._send()
                    return
                outcome = self._error
            self._unsent, self._on_sent = [], None
            self._release_if_done()
        assert on_sent is not None
        self._guarded(partial(on_sent, outcome))

    def _end(self, error: RouterError) -> None:
        """End the connection, and with it what is pending; only the first call counts."""
        if self._error is not None:
            return
        self._error = error
        if self._connection is not None:
            # What nng performs fails now, and completes as usual.
            lib.nng_stream_close(self._connection)
            return
        if self._dialer is not None:
            lib.nng_stream_dialer_close(self._dialer)
        self._fail_pending(error)

    def _error_of(self, code: int) -> TransportError:
        return self._end_error("" if code in _ENDED else text_of(code))

    def _close(self, error: RouterError) -> None:
        self._end(error)
        self._release_if_done()

    def _release_if_done(self) -> None:
        if self._is_closed and not self._n_pending:
            # Not at once, because the caller may still need the operations.
            self._thread.call(self._release)

    def _release(self) -> None:
        for operation in (self._dialing, self._receiving, self._sending):
            if operation is not None:
                operation.free()
        if self._connection is not None:
            lib.nng_stream_free(self._connection)
        self._thread.remove_user(self)


class NngStreamListener(BaseListener):
    """An address that nng listens on; it accepts one connection at a time."""

    def __init__(
        self,
        address: str,
        on_connection: OnConnection,
        thread: IoThread,
        tls_config: Any,
    ) -> None:
        super().__init__(address, on_connection, thread)
        self._is_pending = False
        self._accepting = Operation(partial(thread.call, self._on_accepted))
        try:
            self._listener = _listening(
                address if self._path is None else IPC + self._path.hidden, tls_config
            )
        except BaseException:
            self._accepting.free()
            raise
        try:
            if self._path is not None:
                self._path.publish()
            else:
                self.address = _real_address(address, self._listener)
            thread.add_user(self)
        except BaseException:
            lib.nng_stream_listener_close(self._listener)
            lib.nng_stream_listener_free(self._listener)
            self._accepting.free()
            raise
        self._accept()

    def _close(self) -> None:
        # It ends the pending operation.
        lib.nng_stream_listener_close(self._listener)
        self._release_if_done()

    def _accept(self) -> None:
        with self._lock:
            if not self._is_closed:
                self._is_pending = True
                lib.nng_stream_listener_accept(self._listener, self._accepting.aio)

    def _on_accepted(self) -> None:
        code = self._accepting.result
        connection = None if code else self._accepting.output()
        with self._lock:
            self._is_pending = False
            self._release_if_done()
            if self._is_closed:
                if connection is not None:
                    lib.nng_stream_free(connection)
                return
        pause_s = self._pass_on(partial(self._accepted, code, connection))
        if pause_s:
            self._thread.call_at(time.monotonic() + pause_s, self._accept)
        else:
            self._accept()

    def _accepted(self, code: int, connection: Any) -> NngStream:
        if code:
            raise TransportError(text_of(code))
        try:
            return NngStream(self.address, self._thread, connection)
        except BaseException:
            lib.nng_stream_free(connection)
            raise

    def _release_if_done(self) -> None:
        if self._is_closed and not self._is_pending:
            self._thread.call(self._release)

    def _release(self) -> None:
        self._accepting.free()
        lib.nng_stream_listener_free(self._listener)
        self._thread.remove_user(self)


def _check_code(doing: str, code: int) -> None:
    if code:
        raise failure(doing, code)


def _listening(address: str, tls_config: Any) -> Any:
    made = ffi.new("nng_stream_listener **")
    doing = f"listen on {address}"
    _check_code(doing, lib.nng_stream_listener_alloc(made, address.encode()))
    listener = made[0]
    try:
        if address.startswith(IPC):
            code = lib.nng_stream_listener_set_int(listener, b"ipc:permissions", 0o600)
            _check_code(doing, code)
        else:
            _check_code(doing, lib.nng_stream_listener_set_bool(listener, _NO_DELAY, True))
        if tls_config is not None:
            code = lib.nng_stream_listener_set_ptr(listener, b"tls-config", tls_config)
            _check_code(doing, code)
        _check_code(doing, lib.nng_stream_listener_listen(listener))
    except BaseException:
        lib.nng_stream_listener_free(listener)
        raise
    return listener


def _real_address(address: str, listener: Any) -> str:
    host, _, port = address.rpartition(":")
    if port != "0":
        return address
    bound = ffi.new("int *")
    code = lib.nng_stream_listener_get_int(listener, b"tcp-bound-port", bound)
    _check_code(f"listen on {address}", code)
    return f"{host}:{bound[0]}"


def _joined(pieces: Sequence[Piece]) -> list[Piece]:
    """Return the pieces, in which neighbors that are short are joined."""
    joined: list[Piece] = []
    short: list[Piece] = []
    for piece in pieces:
        if len(piece) < _JOINED:
            short.append(piece)
            continue
        if short:
            joined.append(b"".join(short))
            short = []
        joined.append(piece)
    if short:
        joined.append(b"".join(short))
    return [piece for piece in joined if len(piece)]
