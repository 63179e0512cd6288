"""TLS over any stream of bytes, by OpenSSL.

The stream below moves the encrypted bytes, and OpenSSL never sees a socket. What arrives is
decrypted when somebody receives, so a peer that sends more than is received waits, as it does
without TLS. Until the handshake has ended, encrypted bytes are received in any case: it needs both
sides, and a failed one must be noticed although nobody receives.
"""

from __future__ import annotations

import ssl
import time
from collections.abc import Callable
from functools import partial
from typing import Final, TypeAlias, cast

from dmiddleware.errors import RouterError
from dmiddleware.router.transport.base_stream import BaseStream
from dmiddleware.router.transport.io_thread import IoThread
from dmiddleware.router.transport.stream import Stream

__all__ = ["Explain", "TlsStream"]

Explain: TypeAlias = Callable[[ssl.SSLError], RouterError]
"""Returns the error for what OpenSSL reports."""

_HANDSHAKE_READ: Final = 1 << 12
"""How many encrypted bytes are received at a time before the handshake has ended."""

_READ: Final = 1 << 17
"""How many are received at a time later."""

_UNSENT: Final = 1 << 18
"""About how many encrypted bytes wait for the stream below."""

_ALERT_S: Final = 0.5
"""How long a refused peer has to receive the reason. If the connection were closed while the peer
still sends, the system would drop the reason on its way."""


class TlsStream(BaseStream):
    """Encrypts a stream; is connected when the handshake has ended.

    Args:
        address: the address that was dialed, or that was listened on.
        thread: the thread that runs the callbacks of the stream below.
        stream: carries the encrypted bytes; this object owns it from now on.
        context: the certificates of this side.
        server_name: the name in the listener's certificate; None: this side listens.
        explain: returns the error for a failed handshake.
    """

    def __init__(
        self,
        address: str,
        thread: IoThread,
        stream: Stream,
        context: ssl.SSLContext,
        *,
        server_name: str | None,
        explain: Explain,
    ) -> None:
        super().__init__(address, thread, is_connected=False)
        self._stream = stream
        self._explain = explain
        self._arrived, self._encrypted = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(
            self._arrived,
            self._encrypted,
            server_side=server_name is None,
            server_hostname=server_name,
        )
        self._buffer = memoryview(bytearray(_HANDSHAKE_READ))
        self._is_reading = self._is_writing = self._has_refused = False
        # Why no more encrypted bytes arrive, and why none are accepted.
        self._end_of_stream: RouterError | None = None
        self._send_error: RouterError | None = None
        with self._lock:
            self._advance()

    def _send(self) -> bool:
        if self._send_error is not None:
            self._fail_sending(self._send_error)
            return False
        try:
            return self._write()
        except ssl.SSLError as error:
            self._end(self._explain(error))
            return False

    def _start_receiving(self) -> None:
        self._advance()

    def _close(self, error: RouterError) -> None:
        self._end(error)
        if not self._has_refused:
            self._stream.close()

    def _advance(self) -> None:
        """Continue as far as what has arrived allows; called with the lock held."""
        if self._error is None:
            try:
                if not self._is_connected:
                    self._shake_hands()
                if self._on_bytes is not None:
                    self._deliver()
            except ssl.SSLWantReadError:
                if self._end_of_stream is not None:
                    self._end(self._reason_of(self._end_of_stream))
            except ssl.SSLError as error:
                if not self._is_connected:
                    self._linger()
                self._end(self._explain(error))
        self._read()

    def _shake_hands(self) -> None:
        try:
            self._tls.do_handshake()
            self._is_connected = True
            self._buffer = memoryview(bytearray(_READ))
        finally:
            # The messages of the handshake, or an alert; after it, also what has waited for it.
            self._continue_sending()

    def _deliver(self) -> None:
        """Decrypt what has arrived, and report how much it was."""
        target = self._targets[0]
        n_bytes = cast("int", self._tls.read(len(target), target))
        if not n_bytes:
            self._end(self._end_error())
            return
        assert self._on_bytes is not None
        self._report(partial(self._on_bytes, n_bytes))
        self._targets, self._on_bytes = (), None

    def _read(self) -> None:
        """Receive encrypted bytes, if they are needed."""
        is_needed = (
            self._has_refused
            if self._error is not None
            else self._on_bytes is not None or not self._is_connected
        )
        if is_needed and not self._is_reading and self._end_of_stream is None:
            self._is_reading = True
            self._stream.receive([self._buffer], self._on_arrived)

    def _on_arrived(self, outcome: int | RouterError) -> None:
        with self._lock:
            self._is_reading = False
            if not isinstance(outcome, int):
                self._end_of_stream = outcome
                if self._has_refused:
                    self._stream.close()
            elif self._error is None:
                self._arrived.write(self._buffer[:outcome])
            self._advance()

    def _write(self) -> bool:
        """Encrypt and send what the stream below accepts now; return whether that is everything."""
        while not self._is_writing:
            self._encrypt()
            encrypted = self._encrypted.read()
            if not encrypted:
                return not self._unsent
            self._is_writing = not self._stream.send([encrypted], self._on_written)
        return False

    def _encrypt(self) -> None:
        while self._is_connected and self._unsent and self._encrypted.pending < _UNSENT:
            piece = memoryview(self._unsent[0])[:_UNSENT]
            self._drop_sent(self._tls.write(piece))

    def _on_written(self, error: RouterError | None) -> None:
        with self._lock:
            self._is_writing = False
            if error is None:
                self._continue_sending()
            else:
                # Bytes that arrived before the end are still received.
                self._send_error = error
                self._fail_sending(error)

    def _continue_sending(self) -> None:
        try:
            is_sent = self._write() and self._is_connected
        except ssl.SSLError as error:
            self._end(self._explain(error))
            return
        if is_sent and self._on_sent is not None:
            self._report(partial(self._on_sent, None))
            self._on_sent = None

    def _end(self, error: RouterError) -> None:
        """Fail what is pending; only the first reason counts."""
        if self._error is not None:
            return
        self._error = error
        if self._unsent or self._encrypted.pending or not self._is_writing:
            self._fail_sending(self._send_error or error)
        # Otherwise the stream below has everything, and reports whether it was sent.
        self._fail_receiving(error)

    def _linger(self) -> None:
        """Close the stream below as soon as the refused peer has closed it, or does not in time."""
        self._has_refused = True
        self._thread.call_at(time.monotonic() + _ALERT_S, self._stream.close)

    def _reason_of(self, end: RouterError) -> RouterError:
        if self._is_connected or self._send_error is not None:
            return end
        return self._explain(ssl.SSLEOFError())
