"""Long requests and replies over nng, which sends them in parts."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Iterator
from functools import partial

import numpy as np
import pytest

from dmiddleware.errors import TransportError
from dmiddleware.router.transport import Reply, RequestHandler
from dmiddleware.router.transport.nng import NngChannel, NngTransport
from dmiddleware.router.transport.nng.parts import PART_BYTES
from dmiddleware.router.wire.byte_pieces import BytePieces
from dmiddleware.testing import Tape
from tests.dmiddleware.router.endpoints import DEADLINE_S, unlimited
from tests.dmiddleware.router.request_handlers import echo

MB = 1 << 20
MAX_BYTES = 64 * MB


@contextlib.contextmanager
def talking(serve: RequestHandler, max_reply_bytes: int = MAX_BYTES) -> Iterator[NngChannel]:
    nng = NngTransport()
    with contextlib.closing(
        nng.listen(
            "tcp://127.0.0.1:0", serve, on_disconnect=lambda _: None, limits=unlimited(MAX_BYTES)
        )
    ) as listener:
        channel = nng.dial(
            listener.address,
            connect_timeout_s=DEADLINE_S,
            reply_timeout_s=DEADLINE_S,
            max_frame_bytes=max_reply_bytes,
        )
        with contextlib.closing(channel):
            yield channel


def pattern(size: int) -> bytes:
    return np.random.default_rng(size).bytes(size)


@pytest.mark.parametrize(
    "size", [PART_BYTES - 1, PART_BYTES, PART_BYTES + 1, 2 * PART_BYTES, 20 * MB + 3]
)
def test_a_long_request_and_its_reply_arrive_whole(size: int) -> None:
    content = pattern(size)
    with talking(echo) as channel:
        assert channel.request(content) == content


def test_pieces_are_split_wherever_a_part_ends() -> None:
    content = pattern(3 * MB)
    cuts = [0, 1, 7, PART_BYTES + 1, MB, 2 * PART_BYTES * 5 + 3, 3 * MB]
    pieces = [content[start:end] for start, end in itertools.pairwise(cuts)]
    with talking(echo) as channel:
        assert channel.request(BytePieces(pieces)) == content


def test_many_long_requests_at_a_time_each_get_their_reply() -> None:
    contents = [pattern(MB + number) for number in range(12)]
    tape = Tape()
    with talking(echo) as channel:
        for number, content in enumerate(contents):
            channel.send(content, partial(note_length, tape, number), timeout_s=None)
        tape.wait_for(len(contents))
    assert sorted(tape) == [(number, len(content)) for number, content in enumerate(contents)]


def note_length(tape: Tape, number: int, reply: memoryview | TransportError) -> None:
    tape((number, 0 if isinstance(reply, TransportError) else len(reply)))


def test_an_urgent_request_overtakes_long_ones() -> None:
    arrived, may_go_on = Tape(), threading.Event()

    def serve(raw: memoryview, connection: int, reply: Reply) -> None:
        arrived(len(raw))
        if len(raw) == 1:
            assert may_go_on.wait(DEADLINE_S)
        reply(b"")

    with talking(serve) as channel:
        replies = Tape()
        channel.send(b"1", replies, timeout_s=None)
        for _ in range(3):
            channel.send(bytes(20 * MB), replies, timeout_s=None)
        channel.send(b"urgent", replies, timeout_s=None, urgent=True)
        may_go_on.set()
        replies.wait_for(5)
    assert list(arrived) == [1, 6, *[20 * MB] * 3]


def test_short_replies_overtake_a_long_one() -> None:
    def serve(raw: memoryview, connection: int, reply: Reply) -> None:
        reply(bytes(int(bytes(raw))))

    replies = Tape()
    with talking(serve) as channel:
        channel.send(b"%d" % (20 * MB), partial(note_length, replies, 0), timeout_s=None)
        channel.send(b"10", partial(note_length, replies, 1), timeout_s=None)
        replies.wait_for(2)
    assert list(replies) == [(1, 10), (0, 20 * MB)]


def test_a_reply_that_is_too_long_breaks_the_connection() -> None:
    def serve(raw: memoryview, connection: int, reply: Reply) -> None:
        reply(bytes(2 * MB))

    with talking(serve, max_reply_bytes=MB) as channel:
        with pytest.raises(TransportError, match="too long"):
            channel.request(b"?")
        with pytest.raises(TransportError, match="too long"):
            channel.request(b"?")


def test_a_long_request_that_is_given_up_halfway_breaks_the_connection() -> None:
    may_end = threading.Event()

    def serve(raw: memoryview, connection: int, reply: Reply) -> None:
        assert may_end.wait(DEADLINE_S)

    outcomes = Tape()
    with talking(serve) as channel:
        channel.send(b"keeps the listener busy", outcomes, timeout_s=None)
        channel.send(bytes(20 * MB), outcomes, timeout_s=0.2)
        outcomes.wait_for(2)
        may_end.set()
    late, other = outcomes
    assert isinstance(late, TransportError) and "in time" in str(late)
    assert isinstance(other, TransportError) and "halfway" in str(other)
