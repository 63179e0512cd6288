"""What every transport of byte streams does."""

from __future__ import annotations

import logging
import queue
import random
import threading

import pytest

from dmiddleware.errors import RouterError, RouterStateError, TransportError
from dmiddleware.router.transport.stream import Stream
from tests.dmiddleware.router.stream_ends import DEADLINE_S, End, StreamEndpoints
from tests.waiting import wait_until


def test_bytes_arrive_in_order_in_both_directions(endpoints: StreamEndpoints) -> None:
    with endpoints.connected() as (dialer, accepted):
        for number in range(50):
            dialer.send(b"%03d" % number)
            accepted.send(b"%04d" % number)
        assert accepted.received(150) == b"".join(b"%03d" % number for number in range(50))
        assert dialer.received(200) == b"".join(b"%04d" % number for number in range(50))


def test_many_pieces_of_all_lengths_arrive_whole(endpoints: StreamEndpoints) -> None:
    rng = random.Random(1)
    pieces = [rng.randbytes(rng.choice((0, 1, 60, 5_000, 20_000, 100_000))) for _ in range(100)]
    with endpoints.connected() as (dialer, accepted):
        dialer.send(*pieces)
        expected = b"".join(pieces)
        assert accepted.received(len(expected)) == expected


def test_a_long_message_waits_for_a_peer_that_does_not_receive(
    endpoints: StreamEndpoints,
) -> None:
    content = random.Random(2).randbytes(20_000_000)
    with endpoints.connected(buffer_bytes=0) as (dialer, accepted):
        assert not dialer.stream.send([content], dialer.on_sent)
        with pytest.raises(RouterStateError):
            dialer.stream.send([b"more"], dialer.on_sent)
        accepted.read(1 << 20)
        assert accepted.received(len(content)) == content
        assert dialer.sends(1) == [None]


def test_what_is_sent_before_the_connection_is_made_arrives(endpoints: StreamEndpoints) -> None:
    with endpoints.connecting() as connecting:
        connecting.dialer.send(b"early")
        assert connecting.accepted().received(5) == b"early"


def test_bytes_fill_the_targets_in_order(endpoints: StreamEndpoints) -> None:
    with endpoints.connected(buffer_bytes=0) as (dialer, accepted):
        dialer.send(b"abcdef")
        one, other = bytearray(2), bytearray(3)
        filled = bytearray()
        outcomes: list[int | RouterError] = []
        has_arrived = threading.Semaphore(0)

        def on_bytes(outcome: int | RouterError) -> None:
            outcomes.append(outcome)
            has_arrived.release()

        while len(filled) < 6:
            accepted.stream.receive([memoryview(one), memoryview(other)], on_bytes)
            assert has_arrived.acquire(timeout=DEADLINE_S)
            n_bytes = outcomes[-1]
            assert isinstance(n_bytes, int) and 1 <= n_bytes <= 5
            filled += (one + other)[:n_bytes]
        assert bytes(filled) == b"abcdef"


def test_the_end_of_a_connection_fails_what_is_pending_once(endpoints: StreamEndpoints) -> None:
    content = bytes(20_000_000)
    with endpoints.connected(buffer_bytes=0) as (dialer, accepted):
        assert not dialer.stream.send([content], dialer.on_sent)
        accepted.stream.close()
        assert isinstance(dialer.sends(1)[0], TransportError)
        dialer.ended()
        assert dialer.n_calls <= 2


def test_a_peer_receives_what_was_sent_before_the_end(endpoints: StreamEndpoints) -> None:
    with endpoints.connected() as (dialer, accepted):
        dialer.send(b"the last words")
        assert accepted.received(14) == b"the last words"
        dialer.stream.close()
        accepted.ended()


def test_what_was_sent_before_the_end_is_reported_as_sent(endpoints: StreamEndpoints) -> None:
    is_busy, may_go_on = threading.Event(), threading.Event()

    def keep_busy(_: int | RouterError) -> None:
        is_busy.set()
        may_go_on.wait(DEADLINE_S)

    accepted: queue.SimpleQueue[End] = queue.SimpleQueue()
    with endpoints.listening(lambda stream: accepted.put(End(stream))) as listener:
        dialer = End(endpoints.dial(listener.address), buffer_bytes=0)
        dialer.stream.receive([memoryview(bytearray(1))], keep_busy)
        peer = accepted.get(timeout=DEADLINE_S)
        peer.send(b"!")
        assert is_busy.wait(DEADLINE_S)
        try:
            is_sent = dialer.stream.send([b"the last words"], dialer.on_sent)
            assert peer.received(14) == b"the last words"
            dialer.stream.close()
        finally:
            may_go_on.set()
        assert is_sent or dialer.sends(1) == [None]


def test_a_closed_stream_fails_by_its_callbacks(endpoints: StreamEndpoints) -> None:
    with endpoints.connected() as (dialer, _):
        dialer.stream.close()
        dialer.stream.close()
        dialer.ended()
        with pytest.raises(TransportError):
            dialer.send(b"too late")
        late = End(dialer.stream)
        assert "closed" in str(late.ended())


def test_dialing_an_address_without_a_listener_fails(endpoints: StreamEndpoints) -> None:
    with endpoints.listening(lambda stream: None) as listener:
        address = listener.address
    dialer = End(endpoints.dial(address))
    assert address in str(dialer.ended())
    with pytest.raises(TransportError, match="could not dial"):
        dialer.send(b"hello")
    dialer.stream.close()


def test_a_stream_may_be_closed_while_it_connects(endpoints: StreamEndpoints) -> None:
    with endpoints.listening(End) as listener:
        for _ in range(20):
            dialer = End(endpoints.dial(listener.address))
            dialer.stream.send([b"hello"], dialer.on_sent)
            dialer.stream.close()
            dialer.ended()


def test_a_callback_that_raises_closes_only_its_own_connection(
    endpoints: StreamEndpoints, caplog: pytest.LogCaptureFixture
) -> None:
    accepted: list[End] = []

    def fail(_: int | RouterError) -> None:
        raise ZeroDivisionError

    def accept(stream: Stream) -> None:
        if accepted:
            stream.receive([memoryview(bytearray(10))], fail)
        accepted.append(End(stream, buffer_bytes=0 if accepted else 100))

    with endpoints.listening(accept) as listener, caplog.at_level(logging.CRITICAL):
        dialers = [End(endpoints.dial(listener.address)) for _ in range(2)]
        wait_until(lambda: len(accepted) == 2, "both connections")
        for dialer in dialers:
            # The one whose peer fails may learn of that before it knows that it has sent.
            dialer.stream.send([b"hello"], dialer.on_sent)
        # Either may have been accepted first.
        assert accepted[0].received(5) == b"hello"
        accepted[0].send(b"!")
        served = [dialer for dialer in dialers if dialer.received(1)]
        assert len(served) == 1


def test_accepted_connections_outlive_their_listener(endpoints: StreamEndpoints) -> None:
    with endpoints.connecting() as connecting:
        accepted = connecting.accepted()
        connecting.listener.close()
        connecting.listener.close()
        connecting.dialer.send(b"still here")
        assert accepted.received(10) == b"still here"


def test_one_address_has_one_listener_at_a_time(endpoints: StreamEndpoints) -> None:
    with endpoints.listening(lambda stream: None) as listener:
        with pytest.raises(TransportError, match="could not listen"):
            endpoints.listens.listen(listener.address, lambda stream: None)
        address = listener.address
    again = endpoints.listens.listen(address, lambda stream: None)
    again.close()


def test_all_callbacks_of_a_transport_come_on_one_thread(endpoints: StreamEndpoints) -> None:
    accepted: list[End] = []
    with endpoints.listening(lambda stream: accepted.append(End(stream))) as listener:
        dialers = [End(endpoints.dial(listener.address)) for _ in range(5)]
        for dialer in dialers:
            dialer.send(bytes(2_000_000))
        while len(accepted) < 5:
            threading.Event().wait(0.01)
        for end in accepted:
            end.received(2_000_000)
        for ends in (dialers, accepted):
            assert len(set().union(*(end.threads for end in ends))) <= 1
