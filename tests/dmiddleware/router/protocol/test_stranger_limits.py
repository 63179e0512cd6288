"""Which connections without an authenticated peer are kept."""

from __future__ import annotations

import pytest

from dmiddleware.router.protocol.strangers import BURST, MAX_PER_S, Strangers


def test_a_connection_is_closed_when_its_time_is_over() -> None:
    strangers: Strangers[int] = Strangers(handshake_s=2.0)
    strangers.add(1, 10.0)
    strangers.add(2, 11.0)
    strangers.note_hello(1)
    assert strangers.take_late(11.9) == []
    assert strangers.take_late(12.0) == [1]
    strangers.remove(2)
    assert strangers.take_late(100.0) == [] and len(strangers) == 0


def test_connections_that_keep_coming_are_slowed_down_after_a_burst() -> None:
    strangers: Strangers[int] = Strangers()
    now, pauses = 0.0, []
    for number in range(2_000):
        strangers.add(number, now)
        # Its peer authenticates at once.
        strangers.remove(number)
        pauses.append(strangers.pause_s(now))
        now += pauses[-1] + 0.0001
    assert not any(pauses[:BURST])
    assert 1 / now * (2_000 - BURST) < 1.1 * MAX_PER_S
    # After a while without any, the next ones are accepted at once.
    now += 2 * BURST / MAX_PER_S
    strangers.add(2_000, now)
    assert strangers.pause_s(now) == 0


def test_connections_are_slowed_down_while_there_are_as_many_as_are_kept() -> None:
    strangers: Strangers[int] = Strangers(most=3)
    for number in range(3):
        assert strangers.pause_s(0.0) == 0
        strangers.add(number, 0.0)
    assert strangers.pause_s(0.0) == 1 / MAX_PER_S
    strangers.remove(0)
    assert strangers.pause_s(0.0) == 0


def test_a_silent_connection_is_closed_before_one_with_a_hello() -> None:
    strangers: Strangers[int] = Strangers(most=10, seed=0)
    for number in range(10):
        assert strangers.add(number, 0.0) is None
        if number < 9:
            strangers.note_hello(number)
    assert strangers.add(10, 0.0) == 9
    assert strangers.add(11, 0.0) == 10
    strangers.note_hello(11)
    # All have said hello, so one of them makes room.
    closed = strangers.add(12, 0.0)
    assert closed is not None
    assert closed in {*range(9), 11} and closed not in strangers
    assert len(strangers) == 10


def test_a_peer_far_away_gets_in_among_thousands_of_strangers() -> None:
    """2,400 connect a second; the peer's hello takes 20 ms, and its answer another 100 ms."""
    n_admitted = 0
    for seed in range(200):
        strangers: Strangers[str] = Strangers(seed=seed)
        for step in range(400):
            if step == 200:
                strangers.add("peer", step / 2400)
            if step == 200 + 48:
                strangers.note_hello("peer")
            strangers.add(f"stranger {step}", step / 2400)
        n_admitted += "peer" in strangers
    # It tries again, so a third of the attempts is plenty; the oldest one would never be kept.
    assert n_admitted > 70


def test_there_must_be_room_for_one() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        Strangers(most=0)


def test_connections_that_say_something_cost_more_unless_they_authenticate() -> None:
    strangers: Strangers[int] = Strangers(extra=3)
    for number in range(BURST // 4 + 1):
        assert strangers.pause_s(0.0) == pytest.approx(0.0)
        strangers.add(number, 0.0)
        (strangers.note_hello if number % 2 else strangers.note_end)(number)
    assert strangers.pause_s(0.0) == pytest.approx(4 / MAX_PER_S)
    strangers.trust(1)
    assert strangers.pause_s(0.0) == pytest.approx(1 / MAX_PER_S)
