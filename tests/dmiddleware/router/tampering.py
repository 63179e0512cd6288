"""A transport with someone on the way who reads, forges and replays frames."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial

import msgspec

from dmiddleware.errors import RouterError
from dmiddleware.router.transport.base_stream import BaseStream
from dmiddleware.router.transport.nng_stream import NngStreamTransport
from dmiddleware.router.transport.stream import OnBytes, OnSent, Piece, Stream
from dmiddleware.router.transport.tls import TlsFiles
from dmiddleware.router.wire.frame import (
    MAX_FRAME_BYTES,
    FrameContents,
    FrameType,
    OutgoingFrame,
)
from dmiddleware.router.wire.stream_frames import FrameReader, FrameWriter
from dmiddleware.testing.stream_network import fill, frames_in

__all__ = ["Forge", "Note", "TamperingTransport", "forged_refusal"]

Forge = Callable[[bytes], bytes | None]
Note = Callable[[bytes], None]


def forged_refusal(code: str, reason: str = "forged") -> bytes:
    """Return a refusal without a signature, as anyone can make it."""
    contents = FrameContents(msgspec.msgpack.encode({"code": code, "reason": reason}))
    return bytes(OutgoingFrame(FrameType.REFUSED, contents, None, max_size=4096))


class TamperingTransport:
    """Passes the frames of dialed connections through someone else.

    Args:
        forge: returns an answer to a frame, which then does not reach the listener; or None.
        note: sees each frame of the listener.
        tls: certificates for ``tls+tcp`` addresses.
    """

    def __init__(
        self, forge: Forge, note: Note = lambda frame: None, *, tls: TlsFiles | None = None
    ) -> None:
        self._inner = NngStreamTransport(tls=tls)
        self._forge = forge
        self._note = note
        self.listen = self._inner.listen
        self.close = self._inner.close

    def dial(self, address: str, *, timeout_s: float) -> Stream:
        inner = self._inner.dial(address, timeout_s=timeout_s)
        assert isinstance(inner, BaseStream)
        return _TamperedStream(inner, self._forge, self._note)


class _TamperedStream:
    """A connection whose frames are read on both ways."""

    def __init__(self, inner: BaseStream, forge: Forge, note: Note) -> None:
        self._inner = inner
        self._forge = forge
        self._note = note
        self._sent = FrameReader(MAX_FRAME_BYTES)
        self._came = FrameReader(MAX_FRAME_BYTES)
        self._lock = threading.RLock()
        self._arrived = bytearray()
        self._error: RouterError | None = None
        self._waiting: tuple[Sequence[memoryview], OnBytes] | None = None
        self._buffer = memoryview(bytearray(1 << 16))
        self._is_receiving = False

    def send(self, pieces: Sequence[Piece], on_sent: OnSent) -> bool:
        passed = FrameWriter()
        for frame in map(bytes, frames_in(b"".join(pieces), self._sent)):
            forged = self._forge(frame)
            if forged is None:
                passed.put(frame)
            else:
                self._add(forged)
        content = b"".join(piece for batch in iter(passed.next, []) for piece in batch)
        return not content or self._inner.send([content], on_sent)

    def receive(self, targets: Sequence[memoryview], on_bytes: OnBytes) -> None:
        with self._lock:
            self._waiting = targets, on_bytes
            if not self._is_receiving:
                self._is_receiving = True
                self._inner.receive([self._buffer], self._on_bytes)
        self._inner._thread.post(self._pass_on)

    def close(self) -> None:
        self._inner.close()

    def _on_bytes(self, outcome: int | RouterError) -> None:
        if not isinstance(outcome, int):
            self._error = outcome
            self._pass_on()
            return
        for frame in map(bytes, frames_in(bytes(self._buffer[:outcome]), self._came)):
            self._note(frame)
            self._add(frame)
        self._inner.receive([self._buffer], self._on_bytes)

    def _add(self, frame: bytes) -> None:
        """Let a frame arrive."""
        writer = FrameWriter()
        writer.put(frame)
        with self._lock:
            self._arrived += b"".join(piece for batch in iter(writer.next, []) for piece in batch)
        self._inner._thread.post(self._pass_on)

    def _pass_on(self) -> None:
        with self._lock:
            if self._waiting is None or not (self._arrived or self._error):
                return
            (targets, on_bytes), self._waiting = self._waiting, None
            n_bytes = fill(targets, self._arrived)
            del self._arrived[:n_bytes]
            outcome: int | RouterError = n_bytes
            if not n_bytes:
                assert self._error is not None
                outcome = self._error
        self._inner._guarded(partial(on_bytes, outcome))
