"""The machine's clock: waits without a limit, and the threads that it starts."""

from __future__ import annotations

import threading

import pytest

from dmiddleware.pipeline import Clock, SystemClock
from dmiddleware.testing import FakeClock

DEADLINE_S = 20.0


@pytest.fixture(params=[SystemClock, FakeClock])
def clock(request: pytest.FixtureRequest) -> Clock:
    made: Clock = request.param()
    return made


def test_a_thread_has_a_name_and_knows_whether_it_is_the_current_one(clock: Clock) -> None:
    started, told = threading.Event(), []

    def work() -> None:
        assert started.wait(DEADLINE_S)
        told.append((thread.is_current(), threading.current_thread().name))

    thread = clock.spawn(work, name="worker")
    started.set()
    assert thread.join(DEADLINE_S)
    assert told == [(True, "worker")]
    assert thread.name == "worker"
    assert not thread.is_current()


def test_a_join_returns_whether_the_thread_has_ended(clock: Clock) -> None:
    leave = threading.Event()

    def work() -> None:
        leave.wait(DEADLINE_S)

    thread = clock.spawn(work, name="worker")
    assert not thread.join(0.001)
    leave.set()
    assert thread.join(DEADLINE_S)


def test_a_wait_without_a_limit_ends_when_its_predicate_holds(clock: Clock) -> None:
    condition, there, seen = threading.Condition(), [], []

    def work() -> None:
        with condition:
            seen.append(clock.wait_for(condition, lambda: bool(there), None))

    thread = clock.spawn(work, name="idle")
    assert not thread.join(0.01)
    with condition:
        there.append(1)
        condition.notify_all()
    assert thread.join(DEADLINE_S)
    assert seen == [True]


@pytest.mark.timeout(60)
def test_the_main_thread_notices_what_a_signal_handler_changed_just_before_the_wait() -> None:
    condition = threading.Condition()
    calls = []

    def predicate() -> bool:
        # As if a handler ran after the first call: it changed something, but nobody waited yet.
        calls.append(len(calls))
        return len(calls) > 1

    with condition:
        assert SystemClock().wait_for(condition, predicate, 1000.0)


class SuspendedClock(SystemClock):
    """The machine's clock in a process that is suspended for an hour while it waits."""

    def __init__(self) -> None:
        self.n_looks = 0

    def now(self) -> float:  # type: ignore[override]
        self.n_looks += 1
        return super().now() + (3600.0 if self.n_looks > 1 else 0.0)


def test_a_wait_does_not_end_because_the_process_was_suspended() -> None:
    clock, condition = SuspendedClock(), threading.Condition()

    def has_gone_on() -> bool:
        return clock.n_looks > 3

    with condition:
        assert clock.wait_for(condition, has_gone_on, 30.0)


def test_a_wait_ends_at_its_deadline_all_the_same() -> None:
    clock, condition = SuspendedClock(), threading.Condition()
    with condition:
        assert not clock.wait_for(condition, lambda: False, 1.1)
    assert clock.n_looks < 10
