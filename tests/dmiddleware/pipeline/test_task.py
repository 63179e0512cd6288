"""The task: runs, stops, roles, labels, seeds, calls by hand, state and closing."""

from __future__ import annotations

import contextlib
import functools
import gc
import sys
import threading
import weakref

import pytest

from dmiddleware import Context, MiddlewareError, Task, TaskStateError
from dmiddleware.errors import CheckpointMismatch
from dmiddleware.seeding import derive_seed
from dmiddleware.testing import FakeClock, Tape
from middleware import OfflineRLContext, OnlineRLContext, Role
from tests.waiting import wait_until


class Boom(Exception):
    pass


class Part:
    """A middleware with all the optional methods."""

    def __init__(self, tape, name, *, roles=(), fails=()):
        self.tape, self.name, self.roles, self.fails = tape, name, roles, fails
        self.count = 0

    def __call__(self, ctx):
        self.count += 1

    def setup(self, task):
        self.tape(f"setup {self.name}")
        if "setup" in self.fails:
            raise Boom(f"setup {self.name}")

    def close(self):
        self.tape(f"close {self.name}")
        if "close" in self.fails:
            raise Boom(f"close {self.name}")

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.tape(f"load {self.name}")
        self.count = state["count"]


def nothing(ctx):
    pass


def test_a_run_stopped_by_a_middleware_ends_after_the_whole_step():
    tape = Tape()

    def stop(ctx):
        if ctx.total_step == 2:
            ctx.task.stop("enough")
            ctx.task.stop("a later reason")

    with Task(Context()) as task:
        task.use(tape.generator("a")).use(stop).use(tape.function("b")).run()
        assert task.finish
        assert task.stop_reason == "enough"
        assert task.ctx.total_step == 2
    assert tape == ["a", "b", "/a"] * 3


def test_max_step_limits_one_run_and_the_next_one_continues():
    tape = Tape()
    with Task(Context()) as task:
        task.use(lambda ctx: tape(ctx.total_step))
        task.run(max_step=2)
        assert task.ctx.total_step == 1, "the last step's context is there to be read"
        assert not task.finish
        task.run(2)
        task.run(max_step=0)
    assert tape == [0, 1, 2, 3]


def test_a_failure_is_recorded_even_if_the_task_was_stopped_before():
    def fail(ctx):
        raise RuntimeError("no")

    with Task(Context()) as task:
        task.stop("enough")
        assert task.stopped_ok
        task.stop("the values are NaN", ok=False)
        assert task.stop_reason == "enough"
        assert not task.stopped_ok
    with Task(Context()) as task:
        with pytest.raises(RuntimeError):
            task.use(fail).run()
        task.stop("it failed")
        assert not task.stopped_ok


def test_a_stopped_task_runs_no_further_step():
    tape = Tape()
    with Task(Context()) as task:
        task.use(tape.function("a"))
        task.finish = True
        task.run()
        assert task.stop_reason == "task.finish was set"
        with pytest.raises(TaskStateError, match="cannot be restarted"):
            task.finish = False
    assert tape == []


def test_an_event_handler_may_stop_the_task():
    arrived = threading.Event()

    def emit(ctx):
        ctx.task.emit("solved")
        assert arrived.wait(20)

    with Task(Context()) as task:
        task.on("solved", lambda: (task.stop("solved"), arrived.set()))
        task.use(emit).run()
        assert task.stop_reason == "solved"


def test_a_negative_max_step_is_refused():
    with pytest.raises(ValueError, match="max_step must not be negative, got -1"):
        Task(Context()).use(nothing).run(max_step=-1)


@pytest.mark.parametrize(
    "change",
    [
        lambda task: task.use(nothing),
        lambda task: task.use_wrapper(lambda mw: mw),
        lambda task: task.add_role("learner"),
        lambda task: task.run(),
        lambda task: task.load_state_dict({}),
        lambda task: task.close(),
    ],
)
def test_a_task_cannot_be_changed_while_it_runs(change):
    with Task(Context()) as task, pytest.raises(TaskStateError, match="while"):
        task.use(lambda ctx: change(task)).run()


@pytest.mark.parametrize(
    "use",
    [
        lambda task: task.use(nothing),
        lambda task: task.run(),
        lambda task: task.serial(nothing),
        lambda task: task.wrap(nothing),
    ],
)
def test_a_closed_task_cannot_be_used(use):
    task = Task(Context(), name="trial")
    task.close()
    task.close()
    with pytest.raises(TaskStateError, match="the task 'trial' is closed"):
        use(task)


def test_running_is_true_during_a_run():
    with Task(Context()) as task:
        seen = []
        task.use(lambda ctx: seen.append(ctx.task.running)).run(max_step=1)
        assert seen == [True]
        assert not task.running


def test_middleware_of_other_roles_is_inactive():
    tape = Tape()
    collect, learn = tape.function("collect"), tape.function("learn")
    collect.roles, learn.roles = (Role.COLLECTOR,), (Role.LEARNER,)
    with Task(Context(), roles=(Role.LEARNER,)) as task:
        task.use(collect).use(learn).use(tape.function("everywhere"))
        task.use(collect, roles=(Role.LEARNER, "evaluator")).run(max_step=1)
    assert tape == ["learn", "everywhere", "collect"]


def test_without_roles_everything_is_active():
    tape = Tape()
    collect = tape.function("collect")
    collect.roles = (Role.COLLECTOR,)
    with Task(Context()) as task:
        assert task.has_role("learner")
        assert task.roles == frozenset()
        task.use(collect).run(max_step=1)
    assert tape == ["collect"]


def test_roles_can_be_added_between_runs():
    tape = Tape()
    collect, learn = tape.function("collect"), tape.function("learn")
    collect.roles, learn.roles = (Role.COLLECTOR,), (Role.LEARNER,)
    with Task(Context(), roles="learner") as task:
        task.use(collect).use(learn).run(max_step=1)
        assert not task.has_role(Role.COLLECTOR)
        task.add_role(Role.COLLECTOR)
        assert task.has_role(Role.COLLECTOR)
        task.run(max_step=1)
    assert tape == ["learn", "collect", "learn"]


def test_labels_are_matched_by_globs():
    task = Task(Context(), labels=("gpu.a100", "fast"))
    assert task.labels == {"standalone", "gpu.a100", "fast"}
    assert task.match_labels("gpu.*")
    assert task.match_labels(["cpu.*", "fa?t"])
    assert not task.match_labels("cpu.*")
    assert not task.match_labels([])


def test_seeds_are_derived_from_the_seed_of_the_run_and_the_scope():
    task = Task(Context(), seed=3)
    assert task.seed == 3
    assert task.seed_for("collector", 0, 1) == derive_seed(3, "collector", 0, 1)
    assert task.seed_for("collector", 0, 1) != task.seed_for("collector", 0, 2)


def test_middleware_and_members_of_groups_are_set_up_in_order_and_closed_in_reverse():
    tape = Tape()
    with Task(Context()) as task:
        group = task.serial(Part(tape, "b"), task.parallel(Part(tape, "c"), Part(tape, "d")))
        task.use(Part(tape, "a")).use(group).use(Part(tape, "e"))
        assert tape == [], "nothing happens before the run"
        task.run(max_step=1)
        task.run(max_step=1)
    expected = [f"setup {name}" for name in "abcde"] + [f"close {name}" for name in "edcba"]
    assert tape == expected


def test_an_object_that_is_used_twice_is_set_up_and_closed_once():
    tape = Tape()
    part = Part(tape, "a")
    with Task(Context()) as task:
        task.use(part).use(task.serial(part)).run(max_step=1)
        assert part.count == 2
    assert tape == ["setup a", "close a"]


def test_middleware_added_between_runs_is_set_up_by_the_next_run():
    tape = Tape()
    with Task(Context()) as task:
        task.use(Part(tape, "a")).run(max_step=1)
        task.use(Part(tape, "b")).run(max_step=1)
    assert tape == ["setup a", "setup b", "close b", "close a"]


def test_inactive_middleware_is_not_set_up_but_closed():
    tape = Tape()
    with Task(Context(), roles=("learner",)) as task:
        task.use(Part(tape, "inactive", roles=("collector",)))
        task.use(Part(tape, "learn", roles=("learner",))).run(max_step=1)
    assert tape == ["setup learn", "close learn", "close inactive"]


def test_middleware_is_closed_even_if_nothing_was_run():
    tape = Tape()
    with Task(Context()) as task:
        task.use(Part(tape, "a"))
    assert tape == ["close a"]


def test_middleware_is_closed_after_an_error():
    tape = Tape()

    def fail(ctx):
        raise Boom

    with pytest.raises(Boom), Task(Context()) as task:
        task.use(Part(tape, "a")).use(fail).run()
    assert tape == ["setup a", "close a"]


def test_a_failed_set_up_names_its_middleware_and_closes_all():
    tape = Tape()
    with pytest.raises(Boom, match="setup b") as caught, Task(Context()) as task:
        parts = [Part(tape, "a"), Part(tape, "b", fails=("setup",)), Part(tape, "c")]
        for part in parts:
            task.use(part)
        task.run()
    assert "in the set-up of Part#2" in caught.value.__notes__
    assert tape == ["setup a", "setup b", "close c", "close b", "close a"]


def test_all_middleware_are_closed_even_if_closing_one_fails():
    tape = Tape()
    with (
        pytest.raises(ExceptionGroup, match="closing the task failed") as caught,
        Task(Context()) as task,
    ):
        for name in "abc":
            task.use(Part(tape, name, fails=("close",)))
    assert [str(error) for error in caught.value.exceptions] == ["close c", "close b", "close a"]
    assert caught.value.exceptions[0].__notes__ == ["while Part#3 was being closed"]
    with pytest.raises(Boom, match="close a"):
        Task(Context()).use(Part(tape, "a", fails=("close",))).close()


def test_an_error_of_the_run_and_one_of_closing_are_raised_together():
    tape = Tape()

    def fail(ctx):
        raise KeyError("run")

    with pytest.raises(ExceptionGroup) as caught, Task(Context()) as task:
        task.use(Part(tape, "a", fails=("close",))).use(fail).run()
    assert [type(error) for error in caught.value.exceptions] == [KeyError, Boom]


def test_an_error_in_the_with_block_is_raised_unchanged():
    error = KeyError("outside of the run")
    with pytest.raises(KeyError) as caught, Task(Context()):
        raise error
    assert caught.value is error


def test_the_chain_is_compiled_once_and_again_after_a_change():
    compiled = []

    def wrapper(mw):
        compiled.append(mw)
        return mw

    with Task(Context()) as task:
        task.use(nothing).use_wrapper(wrapper)
        task.run(max_step=3)
        task.run(max_step=3)
        assert compiled == [nothing]
        task.use(nothing).run(max_step=1)
        assert compiled == [nothing] * 3


def test_wrappers_apply_to_every_middleware_the_first_innermost():
    tape = Tape()

    def named(name):
        def wrapper(mw):
            def wrapped(ctx):
                tape(f"<{name}")
                mw(ctx)
                tape(f"{name}>")

            return wrapped

        return wrapper

    with Task(Context()) as task:
        task.use(task.serial(tape.function("a"), task.parallel(tape.function("b"))))
        task.use_wrapper(named("inner")).use_wrapper(named("outer")).run(max_step=1)
    around = ["<outer", "<inner", "{}", "inner>", "outer>"]
    assert tape == [mark.format(name) for name in "ab" for mark in around]


def test_wrappers_are_set_up_first_and_closed_last():
    tape = Tape()

    class Wrapper(Part):
        def __call__(self, mw):
            return mw

    with Task(Context()) as task:
        task.use(Part(tape, "a")).use_wrapper(Wrapper(tape, "w")).run(max_step=1)
    assert tape == ["setup w", "setup a", "close a", "close w"]


def test_a_wrapped_middleware_can_be_called_forward_and_back():
    tape = Tape()
    with Task(Context()) as task:
        inner = task.wrap(tape.generator("inner"))

        def outer(ctx):
            with inner(ctx):
                tape("within")
            layer = inner(ctx)
            tape("by hand")
            layer.back()
            layer.back()

        task.use(outer).run(max_step=1)
    assert tape == ["inner", "within", "/inner", "inner", "by hand", "/inner"]


def test_the_way_back_of_an_open_layer_runs_at_the_end_of_the_step():
    tape = Tape()
    with Task(Context()) as task:
        first, second = task.wrap(tape.generator("1")), task.wrap(tape.generator("2"))

        def forgetful(ctx):
            first(ctx)
            second(ctx)
            yield
            tape("way back")

        task.use(forgetful).use(tape.function("inner")).run(max_step=2)
    assert tape == ["1", "2", "inner", "way back", "/2", "/1"] * 2


def test_an_error_unwinds_the_layers_that_are_open():
    tape = Tape()
    with pytest.raises(Boom), Task(Context()) as task:
        wrapped = task.wrap(tape.generator("open"))
        managed = task.wrap(tape.generator("managed"))

        def fail(ctx):
            wrapped(ctx)
            with managed(ctx):
                raise Boom

        task.use(fail).run()
    assert tape == ["open", "managed", "!managed", "!open"]


def test_an_error_in_a_layers_way_back_is_thrown_into_the_other_layers():
    tape = Tape()

    def late(ctx):
        yield
        raise Boom

    with pytest.raises(Boom), Task(Context()) as task:
        outer, inner = task.wrap(tape.generator("outer")), task.wrap(late)
        task.use(lambda ctx: outer(ctx)).use(lambda ctx: inner(ctx)).run()
    assert tape == ["outer", "!outer"]


def test_a_wrapped_middleware_is_set_up_and_closed():
    tape = Tape()

    class Owner:
        def setup(self, task):
            self.late = task.wrap(Part(tape, "late"))

        def __call__(self, ctx):
            self.late(ctx)

    with Task(Context()) as task:
        early = task.wrap(Part(tape, "early"))
        task.use(lambda ctx: early(ctx)).use(Owner()).run(max_step=2)
    assert tape == ["setup early", "setup late", "close late", "close early"]


def test_wrapping_an_object_that_is_not_a_middleware_is_refused():
    with pytest.raises(MiddlewareError, match="it is a class"):
        Task(Context()).wrap(Part)


def test_a_step_can_be_run_by_hand():
    tape = Tape()
    with Task(OnlineRLContext()) as task:
        for _ in range(2):
            task.forward(tape.generator("a"))
            task.forward(lambda ctx: tape(ctx.total_step))
            task.forward(tape.generator("b"), task.ctx)
            task.backward()
            task.renew()
    assert tape == ["a", 0, "b", "/b", "/a", "a", 1, "b", "/b", "/a"]


def test_an_error_in_a_call_by_hand_is_thrown_into_open_layers():
    tape = Tape()

    def late(ctx):
        yield
        raise Boom

    def fail(ctx):
        raise KeyError

    with Task(Context()) as task:
        task.forward(tape.generator("a"))
        with pytest.raises(KeyError):
            task.forward(fail)
        task.forward(late)
        with pytest.raises(Boom):
            task.backward()
    assert tape == ["a", "!a"]


def test_closing_runs_the_finally_blocks_of_open_layers():
    tape = Tape()

    def careful(ctx):
        try:
            yield
            tape("never")
        finally:
            tape("finally")

    def careless(ctx):
        try:
            yield
        finally:
            raise Boom

    with pytest.raises(Boom) as caught, Task(Context()) as task:
        task.forward(careful)
        task.forward(careless)
    assert tape == ["finally"]
    assert caught.value.__notes__ == ["in middleware careless while it was being closed"]


def test_functions_run_between_steps_once_and_in_order():
    tape = Tape()

    def ask(ctx):
        if ctx.total_step == 0:
            ctx.task.at_step_end(lambda: tape("saved"))
            ctx.task.at_step_end(lambda: tape("twice"))

    with Task(Context()) as task:
        task.use(tape.generator("a")).use(ask).run(max_step=2)
    assert tape == ["a", "/a", "saved", "twice", "a", "/a"]


def test_state_is_restored_into_the_same_chain():
    def build():
        task = Task(OnlineRLContext(), seed=1)
        parts = [Part(Tape(), name) for name in "ab"]
        task.use(parts[0]).use(task.serial(parts[1])).use(nothing)
        task.use(lambda ctx: setattr(ctx, "env_step", ctx.env_step + 8))
        return task, parts

    first, _ = build()
    first.run(max_step=3)
    state = first.state_dict()
    assert state["middleware"] == {"Part": {"count": 3}, "Part#2": {"count": 3}}
    second, parts = build()
    second.load_state_dict(state)
    assert parts[0].tape == ["setup a", "load a"], "the state goes into what is set up"
    second.run(max_step=1)
    assert second.ctx.total_step == 3, "as if the first had run on"
    assert second.ctx.env_step == 32
    assert [part.count for part in parts] == [4, 4]
    first.close()
    second.close()


def test_the_state_of_another_chain_is_refused_and_nothing_is_restored():
    tape = Tape()
    with Task(Context()) as task:
        task.use(Part(tape, "a")).use(Part(tape, "b")).run(max_step=1)
        state = task.state_dict()
    part = Part(tape, "a")
    with Task(Context()) as other:
        other.use(part)
        with pytest.raises(CheckpointMismatch, match="it also has Part#2"):
            other.load_state_dict(state)
        with pytest.raises(CheckpointMismatch, match="it lacks Part"):
            other.load_state_dict({**state, "middleware": {}})
    assert part.count == 0


def test_two_tasks_run_side_by_side():
    tapes = [Tape(), Tape()]
    tasks = [Task(Context(), name=f"task {n}") for n in range(2)]

    def use(task, tape):
        task.on("x", lambda n: tape("handled", n))
        task.use(lambda ctx: ctx.task.emit("x", ctx.total_step))

    for task, tape in zip(tasks, tapes, strict=True):
        use(task, tape)
    threads = [threading.Thread(target=task.run, args=(50,)) for task in tasks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    for task, tape in zip(tasks, tapes, strict=True):
        task.close()
        assert tape == [("handled", n) for n in range(50)]


def test_the_clock_is_the_given_one():
    clock = FakeClock()
    assert Task(Context(), clock=clock).clock is clock
    assert Task(Context()).clock.now() > 0


class Counting:
    """A middleware that declares which context a task has if nobody gives it one."""

    def __init__(self, kind):
        self.default_context = kind

    def __call__(self, ctx):
        ctx.env_step += 2


@pytest.mark.parametrize("how", ["use", "serial", "wrap", "forward"])
def test_a_task_without_a_context_takes_that_of_the_first_middleware_that_declares_one(how):
    counting, other = Counting(OnlineRLContext), Counting(OfflineRLContext)
    with Task(seed=3) as task:
        assert type(task.ctx) is Context
        task.ctx.own = 1
        task.use(nothing)
        assert type(task.ctx) is Context
        getattr(task, how)(counting)
        assert type(task.ctx) is OnlineRLContext
        task.use(counting).use(other).run(max_step=1)
        assert type(task.ctx) is OnlineRLContext
        assert (task.ctx.task, task.ctx.own) == (task, 1)


def test_a_context_that_was_given_is_not_replaced():
    with Task(Context()) as task:
        assert type(task.use(Counting(OnlineRLContext)).ctx) is Context
    given = OnlineRLContext(env_step=3)
    with Task(given) as task:
        assert task.use(Counting(OfflineRLContext)).ctx is given


@pytest.mark.parametrize("ctx", [None, {}, OnlineRLContext])
def test_a_context_that_is_not_a_context_is_refused(ctx):
    with pytest.raises(TypeError, match=r"takes a Context, got"):
        Task(ctx)


def test_a_bound_method_is_set_up_saved_and_closed_with_its_object():
    tape = Tape()
    part = Part(tape, "part")
    with Task(Context()) as task:
        task.use(part.__call__).use(functools.partial(part.__call__)).run(max_step=2)
        assert task.state_dict()["middleware"] == {"Part": {"count": 4}}
    assert tape == ["setup part", "close part"]


def test_calls_by_hand_are_forgotten_when_their_step_is_over():
    collected = []

    def call_inner(ctx):
        def inner(ctx):
            yield

        collected.append(weakref.ref(inner))
        ctx.task.forward(inner)
        ctx.task.wrap(inner)(ctx).back()
        ctx.task.wrap(ctx.task.parallel(inner, nothing))(ctx).back()
        ctx.task.serial(inner)(ctx)

    before = threading.active_count()
    with Task(Context()) as task:
        task.use(call_inner).run(max_step=50)
        gc.collect()
        assert sum(ref() is not None for ref in collected) <= 1
        wait_until(lambda: threading.active_count() <= before + 2, "the end of the threads")


def test_the_cost_of_a_call_by_hand_does_not_grow_with_the_steps():
    inner = functools.partial(nothing)
    counts = []

    def call_inner(ctx):
        ctx.task.forward(inner)
        ctx.task.forward(lambda ctx: None)

    def count_calls(frame, event, argument):
        counts[-1] += 1

    def first(ctx):
        counts.append(0)
        sys.setprofile(count_calls)
        yield
        sys.setprofile(None)

    with Task(Context()) as task:
        task.use(first).use(call_inner).run(max_step=300)
    assert counts[-1] <= counts[1]


def test_a_middleware_called_by_hand_is_set_up_before_its_first_call_and_once():
    tape = Tape()
    part = Part(tape, "part")
    with Task(Context()) as task:
        for _ in range(3):
            task.forward(part)
        assert tape == ["setup part"]
        assert part.count == 3
    assert tape == ["setup part", "close part"]


def wait_for_nothing(ctx):
    ctx.task.wait_for("never", 100.0)


def stop_from_a_thread(ctx):
    thread = threading.Timer(0.05, ctx.task.stop, ("enough",))
    thread.start()


def test_stopping_the_task_ends_a_wait_in_another_branch():
    tape = Tape()
    with Task(Context()) as task:
        task.use(tape.generator("before"))
        task.use(
            task.parallel(
                lambda ctx: ctx.task.stop("enough"),
                task.serial(wait_for_nothing, tape.function("never")),
            )
        )
        task.run()
        assert (task.stop_reason, task.stopped_ok) == ("enough", True)
    assert tape == ["before", "/before"]


def test_stopping_the_task_ends_a_wait_that_has_started():
    tape = Tape()
    with Task(Context()) as task:
        task.use(tape.generator("before")).use(stop_from_a_thread)
        task.use(wait_for_nothing).use(tape.function("never")).run()
        assert task.stop_reason == "enough"
    assert tape == ["before", "/before"]


def test_a_wait_on_the_way_back_is_ended_and_the_others_are_resumed():
    tape = Tape()

    def wait_on_the_way_back(ctx):
        yield
        wait_for_nothing(ctx)
        tape("never")

    with Task(Context()) as task:
        task.use(tape.generator("before")).use(wait_on_the_way_back)
        task.use(lambda ctx: ctx.task.stop("enough")).run()
        assert task.stopped_ok
    assert tape == ["before", "/before"]


def emit_once_awaited(task, *event):
    """Emit the event from a thread, as soon as a thread waits on the task's fake clock."""

    def emit():
        task.clock.wait_until_waiting()
        task.emit(*event)

    threading.Thread(target=emit).start()


def test_an_event_that_has_arrived_is_returned_even_if_the_task_is_stopped():
    returned = threading.Event()

    def stop(ctx):
        ctx.task.stop("enough")
        assert not returned.wait(0.1), "the wait ended before it got the event"

    def wait(ctx):
        ctx.task.on("reply", lambda: stop(ctx))
        emit_once_awaited(ctx.task, "reply")
        try:
            ctx.task.wait_for("reply", 100.0)
        finally:
            returned.set()
        ctx.keep("replied")
        ctx.replied = True

    with Task(Context(), clock=FakeClock()) as task:
        task.use(wait).run()
        assert task.ctx.replied


def test_a_wait_outside_a_run_is_not_ended_by_a_stop():
    with Task(Context(), clock=FakeClock()) as task:
        task.stop("enough")
        emit_once_awaited(task, "reply", 3)
        assert task.wait_for("reply", 100.0).args == (3,)


def stop_at_two(ctx):
    if ctx.total_step == 2:
        ctx.task.stop("enough")


def resumed(state, stopper):
    with Task(Context()) as task:
        task.use(stopper)
        task.load_state_dict(state)
        task.run(max_step=10)
        return task.ctx.total_step, task.stop_reason


def test_a_finished_run_that_is_resumed_runs_no_further_step():
    with Task(Context()) as task:
        task.use(stop_at_two).run()
        state = task.state_dict()
    assert resumed(state, lambda ctx: None) == (2, "enough")


@pytest.mark.parametrize(
    "how", [{"final": False}, {"ok": False}, {"only_local": True}, {"final": True, "ok": False}]
)
def test_an_interrupted_run_that_is_resumed_continues(how):
    with Task(Context()) as task:
        task.use(lambda ctx: ctx.task.stop("interrupted", **how)).run()
        state = task.state_dict()
    assert resumed(state, lambda ctx: None) == (10, None)


def test_a_run_that_fails_after_it_was_stopped_can_be_resumed():
    with Task(Context()) as task:
        task.stop("enough")
        task.stop("the loss is NaN", ok=False)
        assert task.state_dict()["finished"] is None


def test_the_context_is_restored_before_the_middleware_are_set_up():
    class Part:
        def __init__(self):
            self.steps = []

        def setup(self, task):
            self.steps.append(task.ctx.total_step)

        def __call__(self, ctx):
            pass

    part = Part()
    with Task(Context()) as task:
        task.use(lambda ctx: None).run(max_step=3)
        state = task.state_dict()
    with Task(Context()) as task:
        task.use(part)
        task.load_state_dict(state)
    assert part.steps == [2]


@pytest.mark.parametrize("fails", [False, True])
def test_functions_are_called_when_all_middleware_are_closed_the_last_one_first(fails):
    tape = Tape()

    class Closes:
        def setup(self, task):
            task.at_close(lambda: tape("first"))
            task.at_close(lambda: tape("second"))

        def __call__(self, ctx): ...

        def close(self):
            tape("closed")
            if fails:
                raise RuntimeError("no")

    task = Task(Context()).use(Closes())
    task.run(max_step=1)
    with pytest.raises(RuntimeError) if fails else contextlib.nullcontext():
        task.close()
    assert tape == ["closed", "second", "first"]
    task.close()
    assert len(tape) == 3
