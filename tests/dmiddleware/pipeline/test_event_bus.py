"""The event bus: order, contracts, errors, waiting, and the interface to a router."""

from __future__ import annotations

import contextlib
import threading

import pytest

from dmiddleware import Context, Event, EventError, EventQueueFull, Task, WaitTimeout
from dmiddleware.errors import NoSubscriber
from dmiddleware.pipeline import EventBus, SystemClock
from dmiddleware.testing import FakeClock, Tape

DEADLINE_S = 20.0


class Boom(Exception):
    pass


@pytest.fixture
def tape():
    return Tape()


@pytest.fixture
def bus():
    bus = EventBus()
    yield bus
    bus.close()


class Gate:
    """A handler that blocks the thread of the bus until it is opened."""

    def __init__(self):
        self.entered, self.opened = threading.Event(), threading.Event()

    def __call__(self, *args):
        self.entered.set()
        assert self.opened.wait(DEADLINE_S)


@pytest.fixture
def gate(bus):
    """Block the bus, so that emissions stay in its queue."""
    gate = Gate()
    bus.on("gate", gate)
    bus.emit("gate")
    assert gate.entered.wait(DEADLINE_S)
    yield gate
    gate.opened.set()


def drain(bus):
    bus.drain(timeout_s=DEADLINE_S)


def test_handlers_run_in_the_order_of_the_emissions_across_events(bus, tape):
    bus.on("a", lambda n: tape("a", n))
    bus.on("b", lambda n: tape("b", n))
    expected = [(name, n) for n in range(200) for name in "ab"]
    for name, n in expected:
        bus.emit(name, n)
    drain(bus)
    assert tape == expected


def test_handlers_of_one_event_run_once_each_in_the_order_of_registration(bus, tape):
    bus.on("a", lambda: tape("first"))
    bus.on("a", lambda: tape("second"))
    bus.emit("a")
    drain(bus)
    assert tape == ["first", "second"]


def test_handlers_run_on_one_thread_that_is_not_the_emitters(bus, tape):
    bus.on("a", lambda: tape(threading.current_thread()))
    for _ in range(10):
        bus.emit("a")
    drain(bus)
    assert len(set(tape)) == 1
    assert threading.current_thread() not in set(tape)


def test_the_thread_starts_with_the_first_event_that_has_a_handler():
    before = threading.active_count()
    bus = EventBus()
    bus.emit("unheard")
    bus.on("a", lambda: None)
    assert threading.active_count() == before
    bus.emit("a")
    assert threading.active_count() == before + 1
    bus.close()
    assert threading.active_count() == before


def test_arguments_arrive_by_position_and_by_name(bus, tape):
    bus.on("a", lambda *args, **kwargs: tape(args, kwargs))
    bus.emit("a", 1, 2, b=3)
    drain(bus)
    assert tape == [((1, 2), {"b": 3})]


def test_emissions_of_one_thread_stay_in_order_when_many_threads_emit(bus, tape):
    bus.on("a", tape)
    threads = [
        threading.Thread(target=lambda n=n: [bus.emit("a", n, i) for i in range(200)])
        for n in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    drain(bus)
    for n in range(4):
        assert [i for own, i in tape if own == n] == list(range(200))


def test_a_handler_gets_only_emissions_after_its_registration(bus, gate, tape):
    bus.on("a", lambda n: tape("early", n))
    bus.emit("a", 1)
    bus.on("a", lambda n: tape("late", n))
    bus.emit("a", 2)
    gate.opened.set()
    drain(bus)
    assert tape == [("early", 1), ("early", 2), ("late", 2)]


def test_once_is_for_one_emission_even_if_two_are_queued(bus, gate, tape):
    bus.once("a", tape)
    bus.emit("a", 1)
    bus.emit("a", 2)
    gate.opened.set()
    drain(bus)
    bus.emit("a", 3)
    drain(bus)
    assert tape == [1]


def test_off_removes_a_handler_also_for_queued_emissions(bus, gate, tape):
    def keep(n):
        tape("keep", n)

    def drop(n):
        tape("drop", n)

    bus.on("a", keep)
    bus.on("a", drop)
    bus.emit("a", 1)
    assert bus.off("a", drop) == 1
    gate.opened.set()
    drain(bus)
    assert tape == [("keep", 1)]


def test_off_takes_glob_patterns(bus, tape):
    for name in ("node.joined", "node.left", "weights"):
        bus.on(name, lambda name=name: tape(name))
    assert bus.off("node.*") == 2
    for name in ("node.joined", "node.left", "weights"):
        bus.emit(name)
    drain(bus)
    assert tape == ["weights"]
    assert bus.off("nothing") == 0
    assert bus.off(Event("weights")) == 1


def test_methods_can_be_removed(bus, tape):
    class Counter:
        def count(self):
            tape("counted")

    counter = Counter()
    bus.on("a", counter.count)
    assert bus.off("a", counter.count) == 1


def test_a_full_reliable_queue_makes_the_emitter_wait_and_loses_nothing(bus, gate, tape):
    event = Event("a", capacity=2, timeout_s=DEADLINE_S)
    bus.on(event, tape)
    emitted = Tape()

    def emit_all():
        for n in range(20):
            bus.emit(event, n)
            emitted(n)

    emitter = threading.Thread(target=emit_all)
    emitter.start()
    emitted.wait_for(2)
    assert bus.counters()["a"].waiting == 2
    gate.opened.set()
    emitter.join(DEADLINE_S)
    drain(bus)
    assert tape == list(range(20))
    counters = bus.counters()["a"]
    assert (counters.emitted, counters.handled, counters.dropped) == (20, 20, 0)


def test_a_queue_that_stays_full_raises_an_error_that_names_event_and_handler():
    clock = FakeClock()
    bus = EventBus(clock=clock)
    gate = Gate()
    event = Event("a", capacity=1, timeout_s=5.0)
    bus.on(event, gate)
    bus.emit(event)
    assert gate.entered.wait(DEADLINE_S)
    bus.emit(event)
    errors = Tape()

    def emit():
        try:
            bus.emit(event)
        except EventQueueFull as error:
            errors(str(error))

    emitter = threading.Thread(target=emit)
    emitter.start()
    clock.wait_until_waiting()
    clock.advance(4.9)
    assert len(errors) == 0
    clock.advance(0.1)
    emitter.join(DEADLINE_S)
    (message,) = errors
    assert "the queue of the event 'a' is full with 1 emissions, and still was after 5 s" in message
    assert "Gate" in message
    gate.opened.set()
    bus.close()


def test_a_handler_may_emit_and_never_waits_for_itself(bus, tape):
    event = Event("a", capacity=1)

    def again(n):
        tape(n)
        if n < 50:
            bus.emit(event, n + 1)

    bus.on(event, again)
    bus.emit(event, 0)
    tape.wait_for(51)
    assert tape == list(range(51))


def test_a_handler_that_emits_more_than_the_reserve_gets_an_error_instead_of_a_deadlock(bus):
    event = Event("a", capacity=2, timeout_s=DEADLINE_S)
    bus.on(event, lambda: None)
    bus.on("flood", lambda: [bus.emit(event) for _ in range(5)])
    bus.emit("flood")
    drain(bus)
    (error,) = bus.take_errors()
    assert isinstance(error, EventQueueFull)
    assert "is full with 4 emissions" in str(error)
    assert bus.counters()["a"].handled == 4


def test_latest_events_are_replaced_by_newer_ones_and_counted(bus, gate, tape):
    weights = Event("weights", delivery="latest")
    bus.on(weights, tape)
    for version in range(10):
        bus.emit(weights, version)
    gate.opened.set()
    drain(bus)
    bus.emit(weights, 10)
    drain(bus)
    assert tape == [9, 10]
    counters = bus.counters()["weights"]
    assert (counters.emitted, counters.handled, counters.replaced) == (11, 2, 9)


def test_a_steady_stream_of_latest_events_does_not_delay_its_own_delivery(bus, gate, tape):
    weights = Event("weights", delivery="latest")
    bus.on(weights, lambda version: tape("weights", version))
    bus.on("other", lambda: tape("other"))
    bus.emit(weights, 1)
    bus.emit("other")
    bus.emit(weights, 2)
    gate.opened.set()
    drain(bus)
    assert tape == [("weights", 2), "other"]


def test_lossy_events_are_dropped_when_the_queue_is_full_and_counted(bus, gate, tape):
    metrics = Event("metrics", delivery="lossy", capacity=3)
    bus.on(metrics, tape)
    for n in range(10):
        bus.emit(metrics, n)
    gate.opened.set()
    drain(bus)
    assert tape == [0, 1, 2]
    counters = bus.counters()["metrics"]
    assert (counters.emitted, counters.handled, counters.dropped) == (10, 3, 7)


def test_a_string_means_the_contract_that_was_declared_for_the_name(bus, gate, tape):
    bus.on("weights", tape)
    bus.on(Event("weights", delivery="latest"), tape)
    bus.emit("weights", 1)
    bus.emit("weights", 2)
    gate.opened.set()
    drain(bus)
    assert tape == [2, 2]


def test_two_contracts_for_one_name_are_refused(bus):
    bus.on(Event("weights", delivery="latest"), print)
    with pytest.raises(EventError, match=r"declared before as .*latest.* and now as .*lossy"):
        bus.emit(Event("weights", delivery="lossy"))


@pytest.mark.parametrize(
    "build",
    [
        lambda: Event(""),
        lambda: Event("node.*"),
        lambda: Event("a", delivery="maybe"),
        lambda: Event("a", capacity=0),
        lambda: Event("a", timeout_s=-1.0),
        lambda: EventBus().on("node.*", print),
        lambda: EventBus().on("a", None),
        lambda: EventBus().emit("a", only_local=True, only_remote=True),
    ],
)
def test_invalid_events_are_refused(build):
    with pytest.raises(EventError):
        build()


def test_an_error_in_a_handler_names_the_event_and_does_not_stop_other_handlers(bus, tape):
    def fail(n):
        raise Boom(n)

    bus.on("a", fail)
    bus.on("a", tape)
    bus.emit("a", 1)
    bus.emit("a", 2)
    drain(bus)
    assert tape == [1, 2]
    assert bus.has_errors
    errors = bus.take_errors()
    assert [str(error) for error in errors] == ["1", "2"]
    assert "fail of the event 'a'" in errors[0].__notes__[0]
    assert not bus.has_errors
    assert bus.counters()["a"].failed == 2


def test_a_wait_ends_when_the_handlers_have_run():
    clock = FakeClock()
    bus = EventBus(clock=clock)
    tape = Tape()

    def wait():
        args, kwargs = bus.wait_for("reply", timeout_s=5.0)
        tape("returned", *args, *kwargs.items())

    waiter = threading.Thread(target=wait)

    def after(*args, **kwargs):
        bus.emit("noise")  # wakes the waiter early
        waiter.join(0.05)
        tape("after")

    bus.on("noise", lambda: None)
    bus.on("reply", lambda *args, **kwargs: tape("before"))
    waiter.start()
    clock.wait_until_waiting()
    bus.on("reply", after)
    bus.emit("reply", 1, two=2)
    waiter.join(DEADLINE_S)
    assert tape == ["before", "after", ("returned", 1, ("two", 2))]
    assert bus.off("reply") == 2, "the wait left no listener behind"
    bus.close()


def test_a_wait_that_times_out_names_the_event_and_leaves_no_handler():
    clock = FakeClock()
    bus = EventBus(clock=clock)
    errors = Tape()

    def wait():
        try:
            bus.wait_for("reply", timeout_s=5.0)
        except WaitTimeout as error:
            errors(str(error))

    waiter = threading.Thread(target=wait)
    waiter.start()
    clock.wait_until_waiting()
    clock.advance(5.0)
    waiter.join(DEADLINE_S)
    assert "the event 'reply' was not emitted within 5 s" in next(iter(errors))
    assert bus.off("reply") == 0


def test_waiting_within_a_handler_is_refused(bus):
    bus.on("a", lambda: bus.wait_for("b", timeout_s=1.0))
    bus.on("a", lambda: bus.drain(timeout_s=1.0))
    bus.on("a", lambda: bus.close())
    bus.emit("a")
    drain(bus)
    errors = bus.take_errors()
    assert [type(error) for error in errors] == [EventError] * 3
    assert "wait for the handler itself" in str(errors[0])


def test_closing_ends_a_wait():
    clock = FakeClock()
    bus = EventBus(clock=clock)
    errors = Tape()

    def wait():
        try:
            bus.wait_for("reply", timeout_s=5.0)
        except EventError as error:
            errors(str(error))

    waiter = threading.Thread(target=wait)
    waiter.start()
    clock.wait_until_waiting()
    bus.close()
    waiter.join(DEADLINE_S)
    assert errors == ["the task was closed while it waited for the event 'reply'"]


def test_closing_handles_what_was_accepted_and_refuses_more(tape):
    bus = EventBus()
    bus.on("a", tape)
    for n in range(100):
        bus.emit("a", n)
    bus.close()
    bus.close()
    assert tape == list(range(100))
    with pytest.raises(EventError, match="'a' was emitted after the task was closed"):
        bus.emit("a", 100)


def test_closing_ends_an_emitter_that_waits_for_room():
    bus = EventBus()
    gate = Gate()
    event = Event("a", capacity=1, timeout_s=DEADLINE_S)
    bus.on(event, gate)
    bus.emit(event)
    assert gate.entered.wait(DEADLINE_S)
    bus.emit(event)
    errors = Tape()

    def emit():
        try:
            bus.emit(event)
        except EventError as error:
            errors(str(error))

    emitter = threading.Thread(target=emit)
    emitter.start()
    with pytest.raises(WaitTimeout, match="1 of 'a' are queued"):
        bus.close(timeout_s=0.01)
    emitter.join(DEADLINE_S)
    assert "after the task was closed" in next(iter(errors))
    gate.opened.set()
    bus.close()


def test_draining_too_long_names_the_events_that_are_left():
    clock = FakeClock()
    bus = EventBus(clock=clock)
    gate = Gate()
    bus.on("slow", gate)
    bus.emit("slow")
    assert gate.entered.wait(DEADLINE_S)
    bus.emit("slow")
    errors = Tape()

    def wait():
        try:
            bus.drain(timeout_s=3.0)
        except WaitTimeout as error:
            errors(str(error))

    waiter = threading.Thread(target=wait)
    waiter.start()
    clock.wait_until_waiting()
    clock.advance(3.0)
    waiter.join(DEADLINE_S)
    (message,) = errors
    assert message.startswith(
        "after 3 s, some events are still not handled: the handlers of 'slow' ("
    )
    assert message.endswith("1 of 'slow' are queued")
    gate.opened.set()
    bus.close()


def test_the_task_raises_a_handlers_error_at_the_end_of_the_step(tape):
    def fail():
        raise Boom

    with pytest.raises(Boom) as caught, Task(Context()) as task:
        task.on("a", fail)

        def emit(ctx):
            ctx.task.emit("a")
            ctx.task.events.drain(timeout_s=DEADLINE_S)
            yield
            tape("the step ends as usual")

        task.use(emit).run()
    assert tape == ["the step ends as usual"]
    assert any("of the event 'a'" in note for note in caught.value.__notes__)


def test_several_errors_of_handlers_are_raised_together():
    def fail(n):
        raise Boom(n)

    def emit(ctx):
        for n in range(3):
            ctx.task.emit("a", n)
        ctx.task.events.drain(timeout_s=DEADLINE_S)

    with pytest.raises(ExceptionGroup) as caught, Task(Context()) as task:
        task.on("a", fail)
        task.use(emit).run()
    assert [str(error) for error in caught.value.exceptions] == ["0", "1", "2"]


def test_an_error_of_the_step_and_one_of_a_handler_are_raised_together():
    def fail_event():
        raise Boom

    def fail(ctx):
        ctx.task.emit("a")
        ctx.task.events.drain(timeout_s=DEADLINE_S)
        raise KeyError

    with Task(Context()) as task:
        task.on("a", fail_event)
        with pytest.raises(ExceptionGroup) as caught:
            task.use(fail).run()
    assert [type(error) for error in caught.value.exceptions] == [KeyError, Boom]


def test_the_end_of_a_run_waits_for_the_handlers_and_raises_their_errors(tape):
    def fail(n):
        tape(n)
        raise Boom(n)

    with Task(Context()) as task:
        task.on("a", fail)
        with pytest.raises(Boom):
            task.use(lambda ctx: ctx.task.emit("a", 1)).run(max_step=1)
    assert tape == [1]


def test_closing_the_task_raises_errors_that_were_not_raised_before():
    def fail():
        raise Boom

    with pytest.raises(Boom), Task(Context()) as task:
        task.on("a", fail)
        task.emit("a")


def test_middleware_may_emit_while_they_are_closed(tape):
    class Last:
        def setup(self, task):
            self.task = task

        def __call__(self, ctx):
            pass

        def close(self):
            self.task.emit("bye")

    with Task(Context()) as task:
        task.on("bye", lambda: tape("bye"))
        task.use(Last()).run(max_step=1)
    assert tape == ["bye"]


def test_the_tasks_methods_are_those_of_its_bus(tape):
    with Task(Context()) as task:
        task.once("a", lambda n: tape("once", n))
        task.on("a", lambda n: tape("on", n))
        task.emit("a", 1)
        task.emit("a", 2, only_local=True)
        task.emit("a", 3, only_remote=True)
        task.sync()
        assert task.off("a") == 1
        task.emit("a", 4)
        task.sync()
        with pytest.raises(WaitTimeout):
            task.wait_for("never", 0.001)
        assert task.events.counters()["a"].emitted == 2
    assert tape == [("once", 1), ("on", 1), ("on", 2)]


class Wire:
    """Connects buses directly, as a router does, but without a network."""

    def __init__(self):
        self.ends = []

    def end(self):
        self.ends.append(WireEnd(self, len(self.ends)))
        return self.ends[-1]


class WireEnd:
    def __init__(self, wire, node_id):
        self.wire, self.node_id = wire, node_id
        self.labels = (f"node.{node_id}",)
        self.names = set()
        self.suspended = False

    def suspend(self):
        self.suspended = True

    def wait_until_ready(self, *, stopped, task):
        return True

    def attach(self, accept):
        self.accept = accept

    def deliver(self, name, args, kwargs, done=None, waits=True):
        return self.accept(name, args, kwargs, done, waits)

    def subscribe(self, name, *, active):
        (self.names.add if active else self.names.discard)(name)

    def subscribers(self, name, *, timeout_s=0.0):
        return [end.node_id for end in self.wire.ends if end is not self and name in end.names]

    def emit(self, event, args, kwargs, *, to=None):
        peers = [
            end
            for end in self.wire.ends
            if end is not self and event.name in end.names and (to is None or end.node_id in to)
        ]
        if event.required and len(peers) < (1 if to is None else len(to)):
            raise NoSubscriber
        for end in peers:
            end.deliver(event.name, args, kwargs)


def test_a_router_carries_events_to_other_tasks(tape):
    wire = Wire()
    ends = [wire.end(), wire.end()]
    with Task(Context(), ends[0]) as here, Task(Context(), ends[1]) as there:
        assert here.labels == {"distributed", "node.0"}
        for name, task in (("here", here), ("there", there)):
            task.on("a", lambda n, name=name: tape(name, n))
        for kwargs in ({}, {"only_local": True}, {"only_remote": True}):
            here.emit("a", len(kwargs), **kwargs)
            here.sync()
            there.sync()
    marks = list(tape)
    assert sorted(marks[:2]) == [("here", 0), ("there", 0)]
    assert marks[2:] == [("here", 1), ("there", 1)]


def test_an_event_may_be_for_named_nodes_only(tape):
    wire = Wire()
    with contextlib.ExitStack() as stack:
        tasks = [stack.enter_context(Task(Context(), wire.end())) for _ in range(3)]
        for number, task in enumerate(tasks):
            task.on("a", lambda n, number=number: tape(number, n))
        for n, to in enumerate([0, 2, [0, 1], {1, 2, 7}, [], 8]):
            tasks[0].emit("a", n, to=to)
        tasks[0].emit("a", 6, to=[0, 1], only_remote=True)
        for task in tasks:
            task.sync()
    assert sorted(tape) == [(0, 0), (0, 2), (1, 2), (1, 3), (1, 6), (2, 1), (2, 3)]


@pytest.mark.parametrize(
    ("on", "options", "missing"),
    [
        ([], {}, True),
        ([0], {}, False),
        ([1], {}, False),
        ([0], {"only_remote": True}, True),
        ([1], {"only_local": True}, True),
        ([0], {"to": 0}, False),
        ([1], {"to": 0}, True),
        ([0], {"to": [0, 1]}, True),
        ([1], {"to": [0, 1]}, True),
        ([0, 1], {"to": [0, 1]}, False),
    ],
)
def test_a_required_event_without_a_handler_is_an_error(tape, on, options, missing):
    wire = Wire()
    with Task(Context(), wire.end()) as here, Task(Context(), wire.end()) as there:
        for number in on:
            (here, there)[number].on("a", lambda: tape("handled"))
        with pytest.raises(NoSubscriber) if missing else contextlib.nullcontext():
            here.emit(Event("a", required=True), **options)
        here.sync()
        there.sync()
    assert list(tape) == ([] if missing else ["handled"] * (len(on)))


def test_without_a_router_a_required_event_needs_a_handler_here():
    with Task(Context()) as task:
        event = Event("a", required=True)
        for options in ({}, {"only_remote": True}, {"to": 0}, {"to": 1}):
            with pytest.raises(NoSubscriber, match="handler"):
                task.emit(event, **options)
        task.on(event, lambda: None)
        task.emit(event)
        task.emit(event, to=0)
        with pytest.raises(NoSubscriber):
            task.emit(event, to=1)


def test_the_router_is_updated_about_subscriptions():
    end = Wire().end()
    bus = EventBus(router=end)
    bus.on("a", print)
    bus.once("b", lambda: None)
    assert end.names == {"a", "b"}
    end.deliver("b", (), {})
    drain(bus)
    assert end.names == {"a"}
    bus.on("a", repr)
    bus.off("a", print)
    assert end.names == {"a"}
    bus.off("*")
    assert end.names == set()
    with pytest.raises(WaitTimeout):
        bus.wait_for("c", timeout_s=0.0)
    assert end.names == set()
    bus.close()


def test_a_closed_bus_accepts_no_remote_events_and_unsubscribes_at_the_router(tape):
    end = Wire().end()
    bus = EventBus(router=end)
    bus.on("a", tape)
    bus.close()
    assert end.names == set()
    end.deliver("a", (1,), {})
    assert tape == []
    assert bus.counters()["a"].dropped == 1


def test_a_remote_event_is_confirmed_when_its_handlers_have_returned(tape):
    end = Wire().end()
    bus = EventBus(router=end)
    gate = Gate()

    def fail():
        raise Boom

    bus.on("a", gate)
    bus.on("a", lambda: tape("handled"))
    bus.on("b", fail)
    for name in ("a", "b", "nobody"):
        end.deliver(name, (), {}, lambda handled, name=name: tape(name, handled))
    assert gate.entered.wait(DEADLINE_S)
    assert list(tape) == [("nobody", True)]
    gate.opened.set()
    drain(bus)
    assert tape == [("nobody", True), "handled", ("a", True), ("b", True)]
    bus.close()
    end.deliver("a", (), {}, lambda handled: tape("closed", handled))
    assert list(tape)[-1] == ("closed", False)
    assert [type(error) for error in bus.take_errors()] == [Boom]


def test_a_bus_that_closes_out_of_order_suspends_its_router_and_stays_subscribed():
    end = Wire().end()
    bus = EventBus(router=end)
    bus.on("a", print)
    bus.close(in_order=False)
    assert end.suspended


@pytest.mark.parametrize(
    ("ends", "in_order"),
    [("returns", True), ("stops", True), ("stops badly", False), ("raises", False)],
)
def test_only_a_task_that_ends_well_lets_its_router_say_goodbye(ends, in_order):
    end = Wire().end()

    def act(ctx):
        if ends == "raises":
            raise Boom
        if ends.startswith("stops"):
            ctx.task.stop(ends, ok=ends == "stops")

    with contextlib.suppress(Boom), Task(Context(), end) as task:
        task.use(act).run(max_step=1)
    assert end.suspended is not in_order


def test_a_full_queue_refuses_remote_events(tape):
    end = Wire().end()
    bus = EventBus(router=end)
    gate = Gate()
    bus.on(Event("a", capacity=1, timeout_s=0.0), gate)
    end.deliver("a", (), {})
    assert gate.entered.wait(DEADLINE_S)
    assert end.deliver("a", (), {})
    assert not end.deliver("a", (), {})
    assert not end.deliver("a", (), {}, waits=False)
    gate.opened.set()
    bus.close()


def test_the_system_clock_waits_no_longer_than_asked():
    clock = SystemClock()
    condition = threading.Condition()
    with condition:
        assert clock.wait_for(condition, lambda: True, 10.0)
        assert not clock.wait_for(condition, lambda: False, 0.001)
    assert clock.now() <= clock.now()
    assert clock.wall() > 1e9
