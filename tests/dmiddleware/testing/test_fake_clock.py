"""The fake clock moves only when it is advanced."""

from __future__ import annotations

import threading

import pytest

from dmiddleware.testing import FakeClock, Tape


def test_it_moves_only_when_it_is_advanced():
    clock = FakeClock(start_s=5.0)
    assert clock.now() == clock.wall() == 5.0
    clock.advance(2.5)
    assert clock.now() == clock.wall() == 7.5
    assert FakeClock(start_s=1.0, epoch_s=10.0).wall() == 11.0


def test_it_refuses_to_go_back():
    with pytest.raises(ValueError, match="negative"):
        FakeClock().advance(-1.0)


def wait_in_thread(clock, condition, predicate, timeout_s, results):
    def wait():
        with condition:
            results(clock.wait_for(condition, predicate, timeout_s))

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


def test_a_wait_ends_at_its_deadline_and_not_before():
    clock, condition, results = FakeClock(), threading.Condition(), Tape()
    thread = wait_in_thread(clock, condition, lambda: False, 10.0, results)
    clock.wait_until_waiting()
    clock.advance(9.0)
    assert len(results) == 0
    clock.advance(1.0)
    thread.join(20)
    assert results == [False]


def test_a_wait_ends_when_its_predicate_holds():
    clock, condition, results, ready = FakeClock(), threading.Condition(), Tape(), []
    thread = wait_in_thread(clock, condition, lambda: bool(ready), 10.0, results)
    clock.wait_until_waiting()
    with condition:
        ready.append(1)
        condition.notify_all()
    thread.join(20)
    assert results == [True]


def test_a_predicate_that_already_holds_is_evaluated_once():
    clock, condition, evaluated = FakeClock(), threading.Condition(), Tape()
    with condition:
        assert clock.wait_for(condition, lambda: not evaluated(1), 10.0)
    assert evaluated == [1]


def test_a_wait_that_never_ends_fails_instead_of_hanging():
    clock, condition = FakeClock(patience_s=0.01), threading.Condition()
    with condition, pytest.raises(AssertionError, match="not advanced far enough"):
        clock.wait_for(condition, lambda: False, 10.0)
    with pytest.raises(AssertionError, match="expected 1 waiting threads"):
        clock.wait_until_waiting()
