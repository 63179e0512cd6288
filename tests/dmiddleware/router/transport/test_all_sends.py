"""Requests that are sent without waiting, over every transport."""

from __future__ import annotations

import sys
import threading
from functools import partial

from dmiddleware.errors import TransportError
from dmiddleware.router.transport import Channel
from dmiddleware.testing import Tape
from tests.dmiddleware.router.endpoints import MAX_BYTES, NEVER_S, Endpoints
from tests.dmiddleware.router.request_handlers import Parking, echo, in_threads


class Outcomes:
    """Records the outcomes of requests, with their content."""

    def __init__(self) -> None:
        self._tape = Tape()

    def send(self, channel: Channel, content: bytes, timeout_s: float | None = None) -> None:
        def on_reply(outcome: memoryview | TransportError) -> None:
            answer = None if isinstance(outcome, TransportError) else bytes(outcome)
            self._tape(content, answer, threading.current_thread())

        channel.send(content, on_reply, timeout_s=timeout_s)

    def wait(self, n: int) -> list[tuple[bytes, bytes | None]]:
        self._tape.wait_for(n)
        return [mark[:2] for mark in self._tape]

    def threads(self) -> set[threading.Thread]:
        return {mark[2] for mark in self._tape}


def test_each_of_many_senders_gets_each_reply_once(endpoints: Endpoints) -> None:
    outcomes = Outcomes()
    with (
        endpoints.listen(echo) as listener,
        endpoints.dial(listener) as one,
        endpoints.dial(listener) as other,
    ):

        def send(channel: Channel, sender: int) -> None:
            for number in range(50):
                outcomes.send(channel, b"%d %d" % (sender, number) * (1 + number * 20))

        senders = in_threads(
            send, [(channel, sender) for sender, channel in enumerate([one, other] * 2)]
        )
        replies = outcomes.wait(200)
        assert all(content == answer for content, answer in replies)
        assert not outcomes.threads() & {threading.current_thread(), *senders}
    assert len(dict(outcomes.wait(200))) == len(outcomes.wait(200)) == 200


def test_any_number_of_sent_requests_may_wait_for_replies(endpoints: Endpoints) -> None:
    outcomes, parking = Outcomes(), Parking()
    contents = [b"%d" % number for number in range(30)]
    with endpoints.listen(parking) as listener, endpoints.dial(listener) as channel:
        for content in contents:
            outcomes.send(channel, content)
        parked = parking.wait_for(len(contents))
        for content in contents:
            parked[content](content)
        assert sorted(outcomes.wait(len(contents))) == sorted(zip(contents, contents, strict=True))


def test_a_reply_callback_may_send_the_next_request(endpoints: Endpoints) -> None:
    outcomes = Tape()
    with endpoints.listen(echo) as listener, endpoints.dial(listener) as channel:

        def on_reply(outcome: memoryview | TransportError) -> None:
            assert not isinstance(outcome, TransportError)
            outcomes(bytes(outcome))
            if len(outcomes) < 50:
                channel.send(b"%d" % len(outcomes), on_reply, timeout_s=None)

        channel.send(b"0", on_reply, timeout_s=None)
        outcomes.wait_for(50)
    assert outcomes == [b"%d" % number for number in range(50)]


def test_a_sent_request_without_a_reply_fails_at_its_deadline(endpoints: Endpoints) -> None:
    outcomes, parking = Outcomes(), Parking()
    with endpoints.listen(parking) as listener, endpoints.dial(listener) as channel:
        outcomes.send(channel, b"slow", timeout_s=0.3)
        parking.wait_for(1)
        assert outcomes.wait(1) == [(b"slow", None)]
        parking.wait_for(1)[b"slow"](b"slow")
        for number in range(2, 100):
            outcomes.send(channel, b"%d" % number, timeout_s=0.3)
            parking.wait_for(number)[b"%d" % number](b"its own")
            # On a busy machine its own reply may be late as well.
            answer = outcomes.wait(number)[-1][1]
            assert answer in (b"its own", None)
            if answer is not None:
                break
        assert answer == b"its own"


def test_closing_a_channel_fails_all_sent_requests(endpoints: Endpoints) -> None:
    outcomes, parking = Outcomes(), Parking()
    with (
        endpoints.listen(parking) as listener,
        endpoints.dial(listener, reply_timeout_s=NEVER_S) as channel,
    ):
        for content in (b"0", b"1", b"2"):
            outcomes.send(channel, content)
        parking.wait_for(3)
        channel.close()
        assert dict(outcomes.wait(3)) == {b"0": None, b"1": None, b"2": None}
        outcomes.send(channel, b"after")
        assert outcomes.wait(4)[3] == (b"after", None)


def test_a_channel_may_be_closed_while_others_send(endpoints: Endpoints) -> None:
    sent = [b"%d" % number for number in range(12)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with endpoints.listen(echo) as listener:
            for _ in range(30):
                outcomes = Outcomes()
                with endpoints.dial(listener) as channel:
                    sends = [partial(outcomes.send, channel, content) for content in sent]
                    in_threads(
                        lambda act: act(),
                        [(act,) for act in (*sends[:6], channel.close, *sends[6:])],
                    )
                assert sorted(content for content, _ in outcomes.wait(len(sent))) == sorted(sent)
    finally:
        sys.setswitchinterval(interval)


def test_reply_callbacks_never_run_inside_send(endpoints: Endpoints) -> None:
    outcomes = Outcomes()
    with endpoints.listen(echo) as listener, endpoints.dial(listener) as channel:
        outcomes.send(channel, b"?")
        outcomes.wait(1)
        channel.close()
        outcomes.send(channel, b"after")
        outcomes.wait(2)
    assert threading.current_thread() not in outcomes.threads()


def test_all_pending_requests_fail_when_the_connection_breaks(endpoints: Endpoints) -> None:
    outcomes, parking = Outcomes(), Parking()
    with endpoints.listen(parking) as listener, endpoints.dial(listener) as channel:
        for content in (b"0", b"1", b"2"):
            outcomes.send(channel, content, timeout_s=3.0)
        parking.wait_for(3)
        listener.close()
        assert dict(outcomes.wait(3)) == {b"0": None, b"1": None, b"2": None}


def test_a_refusal_fails_the_sent_request(endpoints: Endpoints) -> None:
    outcomes, parking = Outcomes(), Parking()
    with endpoints.listen(parking) as listener, endpoints.dial(listener) as channel:
        outcomes.send(channel, b"?", timeout_s=3.0)
        parking.wait_for(1)[b"?"](None)
        assert outcomes.wait(1) == [(b"?", None)]


def test_sending_a_request_that_is_too_long_fails(endpoints: Endpoints) -> None:
    outcomes = Outcomes()
    with endpoints.listen(echo) as listener, endpoints.dial(listener) as channel:
        content = bytes(MAX_BYTES + 1000)
        outcomes.send(channel, content, timeout_s=3.0)
        assert outcomes.wait(1) == [(content, None)]
