"""The frames of a session: nothing is repeated, lost, sent back or altered without notice."""

from __future__ import annotations

import pytest

from dmiddleware.errors import AuthError, FrameError
from dmiddleware.router.protocol.delivery import InboxState
from dmiddleware.router.protocol.handshake import Identity, PeerLimits, Session
from dmiddleware.router.protocol.session_frames import URGENT, SessionFrames, States
from dmiddleware.router.wire.frame import FrameContents, FrameType

LIMITS = PeerLimits(
    max_event_bytes=1 << 20, inbox_bytes=1 << 20, outbox_bytes=1 << 20, max_event_names=9
)
NOTHING = FrameContents()


def sides(
    key: bytes | None = bytes(32), *, number: int = 7, cover_body: bool = True
) -> tuple[SessionFrames, SessionFrames]:
    """Return the dialer's and the listener's side of a session."""
    session = Session(number, Identity("run", "1", bytes(16)), 1, 1, key, LIMITS)
    dialer, listener = (
        SessionFrames(session, dialed=dialed, cover_body=cover_body) for dialed in (True, False)
    )
    return dialer, listener


def made(side: SessionFrames, kind: FrameType, contents: FrameContents = NOTHING) -> memoryview:
    return memoryview(bytearray(bytes(side.make(kind, contents, incarnation=1))))


@pytest.mark.parametrize("key", [None, bytes(32)])
def test_frames_arrive_in_both_directions(key: bytes | None) -> None:
    dialer, listener = sides(key)
    for number in range(5):
        data = made(dialer, FrameType.DATA, FrameContents(b"%d" % number, (b"array",)))
        frame = listener.read(data)
        assert (frame.type, bytes(frame.metadata), frame.sequence) == (
            FrameType.DATA,
            b"%d" % number,
            number + 1,
        )
        assert dialer.read(made(listener, FrameType.HEARTBEAT)).type is FrameType.HEARTBEAT


def test_urgent_frames_may_overtake_others() -> None:
    dialer, listener = sides()
    data = [made(dialer, FrameType.DATA) for _ in range(2)]
    urgent = [made(dialer, kind) for kind in (FrameType.STATE, FrameType.HEARTBEAT)]
    for raw in (data[0], *urgent, data[1]):
        listener.read(raw)
    assert [kind for kind in FrameType if kind in URGENT] == [
        FrameType.STATE,
        FrameType.HEARTBEAT,
    ]


@pytest.mark.parametrize("kind", [FrameType.DATA, FrameType.HEARTBEAT])
@pytest.mark.parametrize("order", [(0, 0), (1,), (0, 2), (0, 1, 0)])
def test_a_frame_that_is_not_the_next_one_is_refused(
    kind: FrameType, order: tuple[int, ...]
) -> None:
    dialer, listener = sides()
    frames = [made(dialer, kind) for _ in range(3)]
    for index in order[:-1]:
        listener.read(frames[index])
    with pytest.raises(FrameError, match="instead of"):
        listener.read(frames[order[-1]])


def test_a_frame_cannot_be_sent_back_or_used_in_another_session() -> None:
    dialer, listener = sides()
    raw = made(dialer, FrameType.DATA)
    with pytest.raises(AuthError):
        dialer.read(raw)
    with pytest.raises(AuthError):
        sides(number=8)[1].read(raw)
    with pytest.raises(AuthError):
        sides(None)[1].read(raw)
    with pytest.raises(AuthError, match="session 7 in session 8"):
        sides(None, number=8)[1].read(made(sides(None)[0], FrameType.DATA))
    listener.read(raw)


def test_every_flipped_bit_is_noticed() -> None:
    raw = bytes(made(sides()[0], FrameType.DATA, FrameContents(b"meta", (b"array",))))
    for index in range(len(raw)):
        flipped = bytearray(raw)
        flipped[index] ^= 1
        with pytest.raises((AuthError, FrameError)):
            sides()[1].read(memoryview(flipped))


def test_states_are_metadata() -> None:
    dialer, listener = sides()
    states = States(
        ((0, 1, 2, 3), (3, 4, 5, 6)),
        latest=9,
        lossy=8,
        since=7,
        accepts=False,
        resend=True,
        grants=((0, 5, 100),),
    )
    read = States.read(listener.read(made(dialer, FrameType.STATE, states.contents())))
    assert read == states
    assert read.of(3) == InboxState(4, 5, 6) and read.of(1) is None
    for garbage in (b"", b"\x01", b"\x92\x91\x94\x00\x00\x00\xff\x00"):
        frame = listener.read(made(dialer, FrameType.STATE, FrameContents(garbage)))
        with pytest.raises(FrameError):
            States.read(frame)
