"""The frames of one session: numbered, signed and checked, alike for both sides.

A connection keeps the order of its frames, except that urgent ones may overtake the others. So each
direction has two *lanes*, and the frames of each lane have consecutive numbers. Any other number is
a replay or a loss, and ends the connection.
"""

from __future__ import annotations

from typing import Annotated, Final, TypeAlias

import msgspec
from msgspec import Meta

from dmiddleware.errors import AuthError, FrameError
from dmiddleware.router.protocol.delivery import InboxState
from dmiddleware.router.protocol.handshake import Session, hkdf
from dmiddleware.router.wire.frame import (
    MAX_FRAME_BYTES,
    Frame,
    FrameContents,
    FrameMac,
    FrameType,
    OutgoingFrame,
    decode_frame,
    read_metadata,
)

__all__ = ["URGENT", "SessionFrames", "States"]

URGENT: Final = frozenset({FrameType.HEARTBEAT, FrameType.STATE})
"""The frames of a session that overtake the others."""

_Count: TypeAlias = Annotated[int, Meta(ge=0)]

_encode = msgspec.msgpack.Encoder().encode


class States(msgspec.Struct, array_like=True, frozen=True):
    """What a node tells its peer about the streams from it.

    Attributes:
        inboxes: ``(stream, acknowledged, accepted, credit in bytes)`` of the reliable streams.
        latest: the newest frame of ``latest`` events that has arrived; 0: none.
        lossy: the same for ``lossy`` events.
        since: the number of the session in which the numbers of the frames began.
        accepts: whether the node accepts events.
        resend: whether the frames after these were dropped and have to be sent again, behind a
            frame that says so.
        grants: ``(stream, sequence, offset)`` of frames that are sent in fragments from now on, and
            from where on.
    """

    inboxes: tuple[tuple[_Count, _Count, _Count, _Count], ...] = ()
    latest: _Count = 0
    lossy: _Count = 0
    since: _Count = 0
    accepts: bool = True
    resend: bool = False
    grants: tuple[tuple[_Count, _Count, _Count], ...] = ()

    def of(self, stream: int) -> InboxState | None:
        """Return the state of a stream, if it is among them."""
        for number, acknowledged, accepted, credit in self.inboxes:
            if number == stream:
                return InboxState(acknowledged, accepted, credit)
        return None

    @classmethod
    def read(cls, frame: Frame) -> States:
        """Read the metadata of a frame.

        Raises:
            FrameError: if it has no valid states.
        """
        return read_metadata(_decoder, frame.metadata, "state of inboxes")

    def contents(self) -> FrameContents:
        """Return the contents of a frame with these states."""
        return FrameContents(_encode(self))


_decoder: Final = msgspec.msgpack.Decoder(States)


def _frame_macs(
    session: Session, *, dialed: bool, cover_body: bool
) -> tuple[FrameMac | None, FrameMac | None]:
    """Return what signs the frames of one side of a session, and what checks those to it.

    Each direction has a key of its own, so no frame can be sent back. Without a run key there are
    none.
    """
    if session.key is None:
        return None, None
    salt = session.number.to_bytes(8, "little")
    to_listener, to_dialer = (
        FrameMac(hkdf(session.key, salt=salt, info=direction), cover_body=cover_body)
        for direction in (b"dmw to listener", b"dmw to dialer")
    )
    return (to_listener, to_dialer) if dialed else (to_dialer, to_listener)


class SessionFrames:
    """Makes and reads the frames of a session.

    Args:
        session: the result of the handshake.
        dialed: whether this side dialed.
        cover_body: whether the arrays of a frame are signed too.
    """

    def __init__(self, session: Session, *, dialed: bool, cover_body: bool) -> None:
        self._number = session.number
        self._sign, self._check = _frame_macs(session, dialed=dialed, cover_body=cover_body)
        # By whether the lane is the urgent one.
        self._n_sent = {False: 0, True: 0}
        self._n_received = {False: 0, True: 0}

    def make(
        self,
        kind: FrameType,
        contents: FrameContents,
        *,
        incarnation: int,
        stream: int = 0,
        data_sequence: int = 0,
        asks: bool = False,
    ) -> OutgoingFrame:
        """Return the next frame of its lane; the frames of a lane are sent in this order.

        Raises:
            FrameTooLarge: if no peer accepts a frame with these contents.
        """
        lane = kind in URGENT
        frame = OutgoingFrame(
            kind,
            contents,
            self._sign,
            max_size=MAX_FRAME_BYTES,
            session=self._number,
            incarnation=incarnation,
            stream=stream,
            sequence=self._n_sent[lane] + 1,
            data_sequence=data_sequence,
            asks=asks,
        )
        self._n_sent[lane] += 1
        return frame

    def read(self, raw: memoryview, *, body_digest: bytes | None = None) -> Frame:
        """Check and decode a frame of the peer.

        Args:
            raw: the received frame.
            body_digest: see :func:`~dmiddleware.router.wire.frame.decode_frame`.

        Raises:
            FrameError: if it is not a valid frame, or not the next one of its lane.
            AuthError: if its signature is missing or wrong, or it belongs to another session.
        """
        frame = decode_frame(raw, self._check, body_digest=body_digest)
        if frame.session != self._number:
            raise AuthError(f"got a frame of session {frame.session} in session {self._number}")
        lane = frame.type in URGENT
        expected = self._n_received[lane] + 1
        if frame.sequence != expected:
            raise FrameError(
                f"got {frame.type.name} number {frame.sequence} instead of {expected}; it is a "
                "replay, or a frame is missing"
            )
        self._n_received[lane] = expected
        return frame
