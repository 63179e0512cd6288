"""The simulation runs one thread at a time, in the seed's order, on a simulated clock."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from dmiddleware.testing import Simulation, SimulationError, Tape


def take_turns(simulation: Simulation, *, n_threads: int = 4, n_turns: int = 5) -> Tape:
    """Let threads wait for each other's marks; return the marks in order."""
    tape, condition = Tape(), threading.Condition()

    def work(number: int) -> None:
        for turn in range(n_turns):
            with condition:
                simulation.wait_for(condition, lambda turn=turn: len(tape) >= turn * n_threads, 9.0)
                tape(number, turn)
                condition.notify_all()

    threads = [
        simulation.spawn(lambda number=number: work(number), name=f"worker {number}")
        for number in range(n_threads)
    ]
    assert all(thread.join(10.0) for thread in threads)
    return tape


@pytest.fixture
def simulation() -> Iterator[Simulation]:
    with Simulation() as simulation:
        yield simulation


def test_the_same_seed_repeats_the_order_and_another_seed_does_not() -> None:
    runs = []
    for seed in (1, 1, 2):
        with Simulation(seed=seed) as simulation:
            tape = take_turns(simulation)
            runs.append((list(tape), simulation.history))
    assert runs[0] == runs[1]
    assert runs[0][0] != runs[2][0]
    assert runs[0][1] != runs[2][1]


def test_waiting_takes_no_real_time_and_computing_no_simulated(simulation: Simulation) -> None:
    condition = threading.Condition()
    started_at = simulation.wall()
    with condition:
        assert not simulation.wait_for(condition, lambda: False, 3600.0)
    sum(range(10_000))
    assert simulation.now() == 3600.0
    assert simulation.wall() - started_at == 3600.0


def test_the_clock_advances_to_the_earliest_deadline_first(simulation: Simulation) -> None:
    tape = Tape()

    def sleep(seconds: float) -> None:
        simulation.wait_until(lambda: False, seconds)
        tape(seconds, simulation.now())

    for seconds in (3.0, 1.0, 2.0):
        simulation.spawn(lambda seconds=seconds: sleep(seconds), name=f"sleeps {seconds}")
    simulation.run_for(10.0)
    assert tape == [(1.0, 1.0), (2.0, 2.0), (3.0, 3.0)]


def test_a_wait_without_a_deadline_ends_when_another_thread_makes_it_true(
    simulation: Simulation,
) -> None:
    condition, there = threading.Condition(), []

    def give() -> None:
        with condition:
            there.append(1)
            condition.notify()

    simulation.spawn(give, name="giver")
    with condition:
        assert simulation.wait_for(condition, lambda: bool(there), None)


def test_a_thread_that_is_not_notified_waits_until_its_deadline(
    simulation: Simulation,
) -> None:
    condition, there = threading.Condition(), []
    simulation.spawn(lambda: there.append(1), name="giver")
    with condition:
        assert simulation.wait_for(condition, lambda: bool(there), 5.0)
    assert simulation.now() == 5.0


def test_a_missing_notify_is_found_with_the_line_that_waits() -> None:
    condition, there = threading.Condition(), []

    def wait() -> None:
        with condition:
            simulation.wait_for(condition, lambda: bool(there), 5.0)

    with (
        pytest.raises(SimulationError, match=r"its predicate already holds(.|\n)*taker.*in .*wait"),
        Simulation(find_missed=True) as simulation,
    ):
        simulation.spawn(wait, name="taker")
        simulation.run_for(1.0)
        there.append(1)
        simulation.run_for(1.0)


def test_notify_wakes_the_thread_that_has_waited_longest(simulation: Simulation) -> None:
    condition, tickets, tape = threading.Condition(), [], Tape()

    def wait(number: int) -> None:
        with condition:
            simulation.wait_for(condition, lambda: bool(tickets), None)
            tickets.pop()
            tape(number)

    for number in range(3):
        simulation.spawn(lambda number=number: wait(number), name=f"waits {number}")
        simulation.run_for(1.0)
    for _ in range(3):
        with condition:
            tickets.append(1)
            condition.notify()
        simulation.run_for(1.0)
    assert tape == [0, 1, 2]


def test_a_deadlock_lists_where_each_thread_waits() -> None:
    condition = threading.Condition()

    def wait_for_the_other() -> None:
        with condition:
            simulation.wait_for(condition, lambda: False, None)

    with (
        pytest.raises(SimulationError, match="none has a deadline") as raised,
        Simulation() as simulation,
    ):
        simulation.spawn(wait_for_the_other, name="left", group="a node")
        simulation.spawn(wait_for_the_other, name="right")
        with condition:
            simulation.wait_for(condition, lambda: False, None)
    lines = str(raised.value).splitlines()
    assert [line.split(":")[0].strip() for line in lines[1:]] == [
        "the first thread",
        "left of a node",
        "right",
    ]
    assert all("test_simulation.py:" in line for line in lines[1:])
    assert "wait_for_the_other" in lines[2]


def test_an_error_of_a_thread_is_raised_in_the_first_one(simulation: Simulation) -> None:
    def fail() -> None:
        raise ValueError("no such thing")

    simulation.spawn(fail, name="failing")
    with pytest.raises(SimulationError, match="the thread 'failing' failed") as raised:
        simulation.run_for(1.0)
    assert isinstance(raised.value.__cause__, ValueError)


def test_killing_a_group_ends_its_threads_at_their_waits_and_no_others(
    simulation: Simulation,
) -> None:
    tape = Tape()

    def work(name: str) -> None:
        try:
            simulation.wait_until(lambda: False, 5.0)
            tape("resumed", name)
        finally:
            tape("ended", name, simulation.now())
            simulation.wait_until(lambda: False, 1.0)
            tape("cleaned up", name)

    for name in ("one", "other"):
        simulation.spawn(lambda name=name: work(name), name="worker", group=name)
    simulation.run_for(1.0)
    simulation.kill("one")
    simulation.run_for(9.0)
    assert tape == [
        ("ended", "one", 1.0),
        ("resumed", "other"),
        ("ended", "other", 5.0),
        ("cleaned up", "other"),
    ]


def test_the_name_of_a_killed_group_can_be_used_again(simulation: Simulation) -> None:
    done = Tape()
    simulation.spawn(lambda: simulation.run_for(5.0), name="first start", group="a")
    simulation.run_for(1.0)
    simulation.kill("a")
    assert simulation.spawn(lambda: done("second"), name="second start", group="a").join(1.0)
    assert done == ["second"]


def test_a_thread_belongs_to_the_group_of_its_parent(
    simulation: Simulation,
) -> None:
    tape = Tape()

    def child() -> None:
        simulation.run_for(5.0)
        tape("resumed")

    def parent() -> None:
        simulation.spawn(child, name="child")

    simulation.spawn(parent, name="parent", group="a")
    simulation.run_for(1.0)
    simulation.kill("a")
    simulation.run_for(9.0)
    assert tape == []


def test_leaving_ends_every_thread() -> None:
    before = set(threading.enumerate())
    with Simulation() as simulation:
        for number in range(5):
            simulation.spawn(lambda: simulation.run_for(1e9), name=f"sleeper {number}")
        simulation.run_for(1.0)
        assert len(set(threading.enumerate()) - before) == 5
    assert set(threading.enumerate()) <= before


def test_a_join_waits_up_to_its_timeout(simulation: Simulation) -> None:
    thread = simulation.spawn(lambda: simulation.run_for(5.0), name="sleeper")
    assert not thread.join(2.0)
    assert simulation.now() == 2.0
    assert thread.join(10.0)
    assert simulation.now() == 5.0


def test_a_condition_that_is_held_twice_is_held_twice_after_the_wait(
    simulation: Simulation,
) -> None:
    condition = threading.Condition()
    with condition, condition:
        simulation.wait_for(condition, lambda: False, 1.0)
    with pytest.raises(RuntimeError):
        condition.release()


def test_an_error_of_a_predicate_is_raised_where_it_is_waited_for(simulation: Simulation) -> None:
    condition = threading.Condition()
    simulation.spawn(lambda: simulation.run_for(1.0), name="other")

    def check() -> bool:
        if simulation.now() > 0:
            raise KeyError("gone")
        return False

    with condition, pytest.raises(KeyError, match="gone"):
        simulation.wait_for(condition, check, 5.0)


def test_a_real_thread_cannot_wait_in_a_simulation(simulation: Simulation) -> None:
    raised = []

    def work() -> None:
        try:
            simulation.run_for(1.0)
        except SimulationError as error:
            raised.append(str(error))

    thread = threading.Thread(target=work, name="stranger")
    thread.start()
    thread.join(20.0)
    assert len(raised) == 1
    assert "'stranger'" in raised[0]


def test_waiting_for_a_lock_that_a_waiting_thread_holds_is_reported_with_the_stack() -> None:
    lock = threading.Lock()

    def hold() -> None:
        with lock:
            simulation.run_for(1.0)

    with (
        pytest.raises(SimulationError, match=r"'taker' has run for 0.5 real.*\n(.*\n)*.*def take"),
        Simulation(patience_s=0.5) as simulation,
    ):

        def take() -> None:
            def take_it() -> None:
                if lock.acquire(timeout=20.0):  # def take: shown in the stack
                    lock.release()

            take_it()

        simulation.spawn(hold, name="holder")
        simulation.run_for(0.5)
        simulation.spawn(take, name="taker")
        simulation.run_for(0.1)
