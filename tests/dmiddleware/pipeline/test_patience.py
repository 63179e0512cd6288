"""The deadline of a wait for other processes."""

from __future__ import annotations

import pytest

from dmiddleware.pipeline import Patience


def test_the_deadline_counts_from_the_last_hope() -> None:
    patience = Patience(30.0, 100.0)
    assert not patience.is_over(125.0, hope=False)
    assert not patience.is_over(126.0, hope=True)
    assert not patience.is_over(155.9, hope=False)
    assert patience.is_over(156.0, hope=False)


def test_with_hope_there_is_no_deadline() -> None:
    patience = Patience(30.0, 0.0)
    assert not any(patience.is_over(now, hope=True) for now in range(0, 100_000, 1000))


def test_it_speaks_after_a_few_seconds_and_then_once_per_deadline() -> None:
    patience = Patience(30.0, 0.0)
    assert [now for now in range(100) if patience.should_say(now)] == [5, 30, 60, 90]


@pytest.mark.parametrize("timeout_s", [0.01, 0.1, 0.3, 1.0, 7.7, 120.0])
def test_looking_at_the_given_times_reaches_the_deadline(timeout_s: float) -> None:
    now, looks = 1e9 + 0.1, 0
    patience = Patience(timeout_s, now)
    while not patience.is_over(now, hope=False):
        now += patience.next_look_s(now)
        looks += 1
    assert looks <= timeout_s + 2
