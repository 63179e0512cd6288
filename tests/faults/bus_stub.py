"""A transport that loses messages, to show that the ledgers reveal it.

Frames with events go over a Bus0 socket, whose queues drop messages silently, and the sender gets
an acknowledgment at once. Everything else (handshake, heartbeats) uses the real transport. It
signs nothing, so it works only without a key.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Sequence

import msgspec
import pynng

from dmiddleware.router.transport import Channel, Listener, ListenLimits
from dmiddleware.router.transport.interface import OnReply, RequestHandler
from dmiddleware.router.transport.nng import NngTransport
from dmiddleware.router.wire.byte_pieces import WireBytes
from dmiddleware.router.wire.envelope import Acknowledgments
from dmiddleware.router.wire.frame import Frame, FrameType, decode_frame, encode_frame

__all__ = ["BusTransport"]

_CREDIT = 1 << 40


def _bus_address(address: str) -> str:
    if address.startswith("ipc://"):
        return address + ".bus"
    host, _, port = address.rpartition(":")
    return f"{host}:{int(port) + 1}"


class BusTransport:
    """Sends events over Bus0 instead of acknowledged requests."""

    def __init__(self) -> None:
        self._real = NngTransport()

    def listen(
        self,
        address: str,
        serve: RequestHandler,
        *,
        on_disconnect: Callable[[int], None],
        limits: ListenLimits,
    ) -> Listener:
        real = self._real.listen(address, serve, on_disconnect=on_disconnect, limits=limits)
        return _BusListener(real, serve, limits.max_frame_bytes)

    def dial(
        self,
        address: str,
        *,
        connect_timeout_s: float,
        reply_timeout_s: float,
        max_frame_bytes: int,
    ) -> Channel:
        real = self._real.dial(
            address,
            connect_timeout_s=connect_timeout_s,
            reply_timeout_s=reply_timeout_s,
            max_frame_bytes=max_frame_bytes,
        )
        return _BusChannel(real, address)

    def covers_body(self, address: str) -> bool:
        return self._real.covers_body(address)

    def stage_arrays(self, arrays: Sequence[memoryview]) -> None:
        return None


class _BusListener(Listener):
    def __init__(self, real: Listener, serve: RequestHandler, max_frame_bytes: int) -> None:
        self._real = real
        self._serve = serve
        self._bus = pynng.Bus0(listen=_bus_address(real.address), recv_timeout=200)
        self._bus.recv_max_size = max_frame_bytes
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="bus", daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        return self._real.address

    def trust(self, connection: int) -> None:
        self._real.trust(connection)

    def close(self) -> None:
        self._closed = True
        self._thread.join(5.0)
        self._bus.close()
        self._real.close()

    def _work(self) -> None:
        while not self._closed:
            with contextlib.suppress(pynng.Timeout):
                self._serve(memoryview(self._bus.recv()), 0, _ignore)


def _ignore(raw: WireBytes | None, *, urgent: bool = False) -> None:
    """Drop the reply: Bus0 has none."""


class _BusChannel(Channel):
    def __init__(self, real: Channel, address: str) -> None:
        self._real = real
        self._bus = pynng.Bus0(dial=_bus_address(address))
        self._answers: queue.SimpleQueue[tuple[memoryview, OnReply] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="bus", daemon=True)
        self._thread.start()

    def request(self, raw: WireBytes) -> memoryview:
        answer = self._drop(raw)
        return self._real.request(raw) if answer is None else answer

    def send(
        self,
        raw: WireBytes,
        on_reply: OnReply,
        *,
        timeout_s: float | None,
        urgent: bool = False,
    ) -> None:
        answer = self._drop(raw)
        if answer is None:
            self._real.send(raw, on_reply, timeout_s=timeout_s, urgent=urgent)
        else:
            self._answers.put((answer, on_reply))

    def close(self) -> None:
        self._answers.put(None)
        self._thread.join(5.0)
        self._bus.close()
        self._real.close()

    def _work(self) -> None:
        while (item := self._answers.get()) is not None:
            answer, on_reply = item
            on_reply(answer)

    def _drop(self, raw: WireBytes) -> memoryview | None:
        """Send a frame with events and return its acknowledgment; None for any other frame."""
        joined = bytes(raw)
        frame = decode_frame(joined)
        if frame.type is not FrameType.DATA:
            return None
        self._bus.send(joined)
        acks = ((frame.stream, frame.data_sequence, _CREDIT),)
        answer = Frame(
            FrameType.ACK,
            session=frame.session,
            metadata=msgspec.msgpack.encode(Acknowledgments(acks)),
        )
        return memoryview(bytes(encode_frame(answer, max_size=1 << 16)))
