"""A transport with someone on the way who reads, forges and replays replies."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import msgspec

from dmiddleware.router.transport import Channel, OnReply
from dmiddleware.router.transport.sockets import SocketTransport
from dmiddleware.router.wire.byte_pieces import WireBytes
from dmiddleware.router.wire.frame import FrameContents, FrameType, OutgoingFrame

__all__ = ["TamperingTransport", "forged_refusal"]


def forged_refusal(code: str) -> bytes:
    """Return a refusal without a signature, as anyone can make it."""
    refusal = {"code": code, "reason": "forged"}
    contents = FrameContents(msgspec.msgpack.encode(refusal))
    return bytes(OutgoingFrame(FrameType.REFUSED, contents, None, max_size=4096))


class TamperingTransport(SocketTransport):
    """Passes requests and replies through someone else.

    Args:
        forge: returns a reply to a request, which then does not reach the listener; or None.
        note: sees each request and its real reply.
    """

    def __init__(
        self,
        forge: Callable[[bytes], bytes | None],
        note: Callable[[bytes, bytes], None] = lambda request, reply: None,
    ) -> None:
        super().__init__()
        self._forge = forge
        self._note = note

    def dial(self, address: str, **options: Any) -> Channel:
        return _TamperingChannel(super().dial(address, **options), self._forge, self._note)


class _TamperingChannel(Channel):
    def __init__(
        self,
        inner: Channel,
        forge: Callable[[bytes], bytes | None],
        note: Callable[[bytes, bytes], None],
    ) -> None:
        self._inner = inner
        self._forge = forge
        self._note = note

    def request(self, raw: WireBytes) -> memoryview:
        forged = self._forge(bytes(raw))
        if forged is not None:
            return memoryview(bytearray(forged))
        reply = self._inner.request(raw)
        self._note(bytes(raw), bytes(reply))
        return reply

    def send(
        self,
        raw: WireBytes,
        on_reply: OnReply,
        *,
        timeout_s: float | None,
        urgent: bool = False,
    ) -> None:
        forged = self._forge(bytes(raw))
        if forged is not None:
            reply = memoryview(bytearray(forged))
            threading.Thread(target=on_reply, args=(reply,), daemon=True).start()
            return

        def pass_on(outcome: Any) -> None:
            if isinstance(outcome, memoryview):
                self._note(bytes(raw), bytes(outcome))
            on_reply(outcome)

        self._inner.send(raw, pass_on, timeout_s=timeout_s, urgent=urgent)

    def close(self) -> None:
        self._inner.close()
