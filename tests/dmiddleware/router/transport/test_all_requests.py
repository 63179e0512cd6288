"""What the router relies on, over every transport."""

from __future__ import annotations

import queue
import threading

import pytest

from dmiddleware.errors import TransportError
from dmiddleware.router.transport import Channel, Reply
from dmiddleware.testing import Tape
from tests.dmiddleware.router.endpoints import (
    DEADLINE_S,
    MAX_BYTES,
    NEVER_S,
    BackgroundRequest,
    Endpoints,
)
from tests.dmiddleware.router.request_handlers import Parking, echo, in_threads, replying_with
from tests.dmiddleware.router.unix_sockets import comes_true


@pytest.mark.parametrize("size", [0, 1, 1000, 70_000, MAX_BYTES - 100])
def test_a_request_gets_its_reply(endpoints: Endpoints, size: int) -> None:
    content = bytes(number % 251 for number in range(size))
    with endpoints.listen(echo) as listener, endpoints.dial(listener) as channel:
        for _ in range(2):
            assert channel.request(content) == content
            assert channel.request(bytearray(content)) == content


def test_any_number_of_requests_may_wait_for_replies(endpoints: Endpoints) -> None:
    parking = Parking()
    with endpoints.listen(parking) as listener, endpoints.dial(listener) as channel:
        asking = [BackgroundRequest(channel, b"%d" % number) for number in range(20)]
        for content, reply in parking.wait_for(20).items():
            reply(content)
        assert [one.result() for one in asking] == [b"%d" % number for number in range(20)]


def test_each_request_gets_its_own_reply(endpoints: Endpoints) -> None:
    wrong: list[bytes] = []

    def make_requests(channel: Channel, asker: int) -> None:
        for number in range(50):
            content = b"%d %d" % (asker, number)
            answer = bytes(channel.request(content))
            if answer != content:
                wrong.append(answer)

    with (
        endpoints.listen(echo) as listener,
        endpoints.dial(listener) as one,
        endpoints.dial(listener) as other,
    ):
        in_threads(
            make_requests, [(channel, asker) for asker, channel in enumerate([one, other] * 3)]
        )
    assert wrong == []


def test_replying_none_closes_only_this_connection(endpoints: Endpoints) -> None:
    @replying_with
    def serve(raw: memoryview, _: int) -> bytes | None:
        return None if bytes(raw) == b"bad" else bytes(raw)

    with (
        endpoints.listen(serve) as listener,
        endpoints.dial(listener) as good,
        endpoints.dial(listener) as bad,
    ):
        with pytest.raises(TransportError):
            bad.request(b"bad")
        assert good.request(b"good") == b"good"


@pytest.mark.parametrize("size", [10, 100_000])
def test_received_bytes_are_writable(endpoints: Endpoints, size: int) -> None:
    came: list[bool] = []

    @replying_with
    def serve(raw: memoryview, _: int) -> bytes:
        came.append(raw.readonly)
        return bytes(raw)

    with endpoints.listen(serve) as listener, endpoints.dial(listener) as channel:
        assert not channel.request(bytes(size)).readonly
    assert came == [False]


def test_a_late_reply_is_not_taken_for_the_next_one(endpoints: Endpoints) -> None:
    parking = Parking()
    with (
        endpoints.listen(parking) as listener,
        endpoints.dial(listener, reply_timeout_s=0.3) as channel,
    ):
        with pytest.raises(TransportError):
            channel.request(b"slow")
        parking.wait_for(1)[b"slow"](b"slow")
        in_time = 0
        for number in range(100):
            asking = BackgroundRequest(channel, b"%d" % number)
            parking.wait_for(number + 2)[b"%d" % number](b"%d" % number)
            answer = asking.result()
            # On a busy machine its own reply may be late as well.
            assert answer == b"%d" % number or isinstance(answer, TransportError)
            in_time += answer == b"%d" % number
            if in_time == 5:
                break
        assert in_time == 5


def test_closing_a_channel_fails_pending_requests_at_once(endpoints: Endpoints) -> None:
    parking = Parking()
    with (
        endpoints.listen(parking) as listener,
        endpoints.dial(listener, reply_timeout_s=NEVER_S) as channel,
    ):
        asking = BackgroundRequest(channel, b"?")
        parking.wait_for(1)
        channel.close()
        channel.close()
        assert isinstance(asking.result(), TransportError)
        with pytest.raises(TransportError, match="closed"):
            channel.request(b"?")


def test_a_request_that_is_too_long_closes_only_its_connection(endpoints: Endpoints) -> None:
    lengths: list[int] = []

    @replying_with
    def serve(raw: memoryview, _: int) -> bytes:
        lengths.append(len(raw))
        return b"ok"

    with (
        endpoints.listen(serve) as listener,
        endpoints.dial(listener) as good,
        endpoints.dial(listener, reply_timeout_s=1.0) as bad,
    ):
        with pytest.raises(TransportError):
            bad.request(bytes(MAX_BYTES + 1000))
        bad.close()
        assert good.request(b"1234") == b"ok"
    assert lengths == [4]


# The memory transport also raises the error in the thread that it ends.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_request_whose_handler_raises_closes_only_its_connection(
    endpoints: Endpoints,
) -> None:
    def serve(raw: memoryview, _: int, reply: Reply) -> None:
        if bytes(raw) == b"bad":
            raise KeyError("a defect")
        reply(bytes(raw))

    with endpoints.listen(serve) as listener, endpoints.dial(listener) as good:
        for _ in range(6):
            with endpoints.dial(listener, reply_timeout_s=NEVER_S) as bad:
                assert isinstance(BackgroundRequest(bad, b"bad").result(), TransportError)
        assert good.request(b"good") == b"good"


def test_connections_are_numbered_and_disconnects_are_reported(endpoints: Endpoints) -> None:
    numbers: list[int] = []
    gone: list[int] = []

    @replying_with
    def serve(raw: memoryview, connection: int) -> bytes:
        numbers.append(connection)
        return b""

    with endpoints.listen(serve, gone.append) as listener, endpoints.dial(listener) as stays:
        stays.request(b"?")
        with endpoints.dial(listener) as goes:
            goes.request(b"?")
            goes.request(b"?")
        assert comes_true(lambda: bool(gone))
        stays.request(b"?")
        stays_number, goes_number = numbers[0], numbers[1]
        assert stays_number != goes_number
        assert numbers == [stays_number, goes_number, goes_number, stays_number]
        assert gone == [goes_number]


def test_an_address_can_be_reused_only_after_its_listener_is_closed(endpoints: Endpoints) -> None:
    with endpoints.listen(echo) as listener:
        address = listener.address
        with (
            pytest.raises(TransportError, match="listen"),
            endpoints.listen(echo, address=address),
        ):
            pass
    with endpoints.listen(echo, address=address) as listener, endpoints.dial(listener) as channel:
        assert channel.request(b"again") == b"again"


def test_dialing_without_a_listener_fails_in_time(endpoints: Endpoints) -> None:
    with endpoints.listen(echo) as listener:
        pass
    outcomes: queue.SimpleQueue[str] = queue.SimpleQueue()

    def dial() -> None:
        with (
            pytest.raises(TransportError, match="dial"),
            endpoints.dial(listener, connect_timeout_s=0.3),
        ):
            pass
        outcomes.put("in time")

    threading.Thread(target=dial, daemon=True).start()
    assert outcomes.get(timeout=DEADLINE_S) == "in time"


def test_closing_leaves_no_thread(endpoints: Endpoints) -> None:
    before = set(threading.enumerate())
    with endpoints.listen(echo) as listener, endpoints.dial(listener) as channel:
        channel.request(b"?")
        outcomes = Tape()
        channel.send(b"?", outcomes, timeout_s=None)
        outcomes.wait_for(1)
    listener.close()
    channel.close()
    assert set(threading.enumerate()) <= before


def test_only_the_first_reply_counts(endpoints: Endpoints) -> None:
    def serve(raw: memoryview, _: int, reply: Reply) -> None:
        reply(bytes(raw))
        reply(b"another")
        reply(None)

    with endpoints.listen(serve) as listener, endpoints.dial(listener) as channel:
        for number in range(20):
            assert channel.request(b"%d" % number) == b"%d" % number


@pytest.mark.parametrize("content", [b"too late", None])
def test_a_reply_to_a_closed_connection_is_dropped(
    endpoints: Endpoints, content: bytes | None
) -> None:
    parking = Parking()
    gone = Tape()
    with endpoints.listen(parking, gone) as listener, endpoints.dial(listener) as stays:
        with endpoints.dial(listener) as goes:
            asking = BackgroundRequest(goes, b"goes")
            parking.wait_for(1)
            goes.close()
            assert isinstance(asking.result(), TransportError)
        gone.wait_for(1)
        parking.wait_for(1)[b"goes"](content)
        asking = BackgroundRequest(stays, b"stays")
        parking.wait_for(2)[b"stays"](b"in time")
        assert asking.result() == b"in time"


def test_a_reply_after_the_listener_closed_is_dropped(endpoints: Endpoints) -> None:
    parking = Parking()
    with (
        endpoints.listen(parking) as listener,
        endpoints.dial(listener, reply_timeout_s=1.0) as channel,
    ):
        asking = [BackgroundRequest(channel, b"0"), BackgroundRequest(channel, b"1")]
        parked = parking.wait_for(2)
        listener.close()
        parked[b"0"](b"too late")
        parked[b"1"](None)
        assert all(isinstance(one.result(), TransportError) for one in asking)


def test_a_later_refusal_closes_only_its_connection(endpoints: Endpoints) -> None:
    parking = Parking()
    with (
        endpoints.listen(parking) as listener,
        endpoints.dial(listener) as good,
        endpoints.dial(listener) as bad,
    ):
        asking = {content: BackgroundRequest(bad, content) for content in (b"bad", b"with it")}
        parking.wait_for(2)[b"bad"](None)
        assert isinstance(asking[b"bad"].result(), TransportError)
        assert isinstance(asking[b"with it"].result(), TransportError)
        still = BackgroundRequest(good, b"good")
        parking.wait_for(3)[b"good"](b"good")
        assert still.result() == b"good"
