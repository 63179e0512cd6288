"""Parallel branches, groups and locks."""

from __future__ import annotations

import logging
import threading

import pytest

import dmiddleware.pipeline.branches as branches_module
from dmiddleware import ChainError, Context, EventError, Task, WaitTimeout
from dmiddleware.pipeline.branches import Branches
from dmiddleware.pipeline.onion import Chain, CompiledMiddleware
from dmiddleware.testing import Tape

DEADLINE_S = 20.0


class Boom(Exception):
    pass


def fail(ctx):
    raise Boom


def meeting(barrier):
    """Return a middleware that waits for all branches to reach it, in both directions."""

    def meet(ctx):
        barrier.wait(DEADLINE_S)
        yield
        barrier.wait(DEADLINE_S)

    return meet


def test_branches_run_at_the_same_time_in_both_directions():
    barrier = threading.Barrier(3)
    with Task(Context()) as task:
        task.use(task.parallel(*(meeting(barrier) for _ in range(3)))).run(max_step=2)


def test_the_step_continues_when_all_branches_are_done():
    tape, gate = Tape(), threading.Event()

    def slow(ctx):
        assert gate.wait(DEADLINE_S)
        tape("slow")

    with Task(Context()) as task:
        task.use(task.parallel(slow, lambda ctx: gate.set()))
        task.use(tape.function("after")).run(max_step=1)
    assert tape == ["slow", "after"]


def test_the_way_back_of_all_branches_ends_before_the_middleware_before_them_is_resumed():
    tape = Tape()
    with Task(Context()) as task:
        task.use(tape.generator("before"))
        task.use(task.parallel(tape.generator("a"), tape.generator("b")))
        task.use(tape.generator("after")).run(max_step=1)
    marks = list(tape)
    assert marks[0] == "before"
    assert set(marks[1:3]) == {"a", "b"}
    assert marks[3:5] == ["after", "/after"]
    assert set(marks[5:7]) == {"/a", "/b"}
    assert marks[7:] == ["/before"]


def test_a_branch_keeps_its_thread_in_all_steps_and_directions():
    threads = {"a": set(), "b": set()}

    def remember(name):
        def mw(ctx):
            threads[name].add(threading.get_ident())
            yield
            threads[name].add(threading.get_ident())

        return mw

    with Task(Context()) as task:
        task.use(task.parallel(remember("a"), remember("b"))).run(max_step=5)
    assert len(threads["a"]) == len(threads["b"]) == 1
    assert threads["a"] != threads["b"]
    assert threading.get_ident() not in threads["a"] | threads["b"]


def test_closing_the_task_ends_the_threads():
    before = threading.active_count()
    with Task(Context()) as task:
        task.use(task.parallel(lambda ctx: None, lambda ctx: None)).run(max_step=1)
        assert threading.active_count() == before + 2
    assert threading.active_count() == before


def test_branches_share_the_context():
    def write(ctx):
        ctx.mine = 1

    def write_too(ctx):
        ctx.yours = 2

    with Task(Context()) as task:
        task.use(task.parallel(write, write_too)).run(max_step=1)
        assert (task.ctx.mine, task.ctx.yours) == (1, 2)


def test_errors_of_branches_are_grouped_and_the_other_branches_finish():
    tape = Tape()
    with pytest.raises(ExceptionGroup) as caught, Task(Context()) as task:
        task.use(task.parallel(fail, tape.function("healthy"), fail)).run()
    assert [type(error) for error in caught.value.exceptions] == [Boom, Boom]
    assert "2 of 3 branches of middleware 1 (parallel) failed" in str(caught.value)
    notes = [error.__notes__[0] for error in caught.value.exceptions]
    assert notes == ["in middleware 1.1 (fail)", "in middleware 1.3 (fail)"]
    assert tape == ["healthy"]


def test_the_error_of_a_single_branch_is_grouped_too():
    with pytest.raises(ExceptionGroup) as caught, Task(Context()) as task:
        task.use(task.parallel(fail, lambda ctx: None)).run()
    assert [type(error) for error in caught.value.exceptions] == [Boom]


def test_a_later_error_unwinds_the_branches_in_reverse_each_on_its_thread():
    tape = Tape()

    def branch(name):
        def mw(ctx):
            thread = threading.get_ident()
            try:
                yield
            finally:
                tape(name, threading.get_ident() == thread)

        return mw

    with pytest.raises(Boom), Task(Context()) as task:
        task.use(task.parallel(branch("a"), branch("b"))).use(fail).run()
    assert tape == [("b", True), ("a", True)]


def test_an_interrupt_raised_in_a_branch_is_not_wrapped():
    def interrupt(ctx):
        raise SystemExit(4)

    with pytest.raises(SystemExit) as caught, Task(Context()) as task:
        task.use(task.parallel(fail, interrupt)).run()
    assert caught.value.code == 4
    assert "another error: Boom()" in caught.value.__notes__


def test_an_interrupt_from_the_keyboard_waits_for_the_branches(monkeypatch, caplog):
    real_wait = branches_module.wait
    presses = [1]

    def wait_interrupted(futures, timeout):
        if presses:
            presses.pop()
            raise KeyboardInterrupt
        return real_wait(futures, timeout)

    monkeypatch.setattr(branches_module, "wait", wait_interrupted)
    tape = Tape()
    with pytest.raises(KeyboardInterrupt) as caught, Task(Context()) as task:
        task.use(task.parallel(tape.generator("a"), tape.generator("b"), fail)).run()
    assert sorted(tape) == ["!a", "!b", "a", "b"]
    assert "was interrupted and is waiting for its branches" in caplog.text
    assert "another error: Boom()" in caught.value.__notes__


def test_a_second_interrupt_does_not_wait_for_the_branches(monkeypatch):
    gate, tape = threading.Event(), Tape()

    def wait_interrupted(futures, timeout):
        raise KeyboardInterrupt

    def slow(ctx):
        tape(gate.wait(DEADLINE_S))

    monkeypatch.setattr(branches_module, "wait", wait_interrupted)
    with pytest.raises(KeyboardInterrupt), Task(Context()) as task:
        task.use(task.parallel(task.serial(Tape().generator("suspended"), slow))).run()
    gate.set()
    tape.wait_for(1)
    assert tape == [True], "the interrupt did not wait for it"


def test_a_long_wait_names_the_branches_in_the_log(caplog):
    warned = threading.Event()

    def slow(ctx):
        assert warned.wait(DEADLINE_S)

    class Warned(logging.Handler):
        def emit(self, record):
            warned.set()

    steps = [[CompiledMiddleware(lambda ctx: None, "fast")], [CompiledMiddleware(slow, "slow")]]
    branches = Branches(map(Chain, steps), "middleware 7 (parallel)", report_s=0.01)
    logger = logging.getLogger(branches_module.__name__)
    logger.addHandler(handler := Warned())
    try:
        Chain([CompiledMiddleware(branches.middleware, "parallel")]).run(Context())
    finally:
        logger.removeHandler(handler)
        branches.close()
    assert "middleware 7 (parallel) is still waiting for its branches 2" in caplog.text


def test_inactive_members_are_skipped():
    tape = Tape()
    with Task(Context(), roles=("learner",)) as task:
        collect, learn = tape.function("collect"), tape.function("learn")
        collect.roles, learn.roles = ("collector",), ("learner",)
        task.use(task.parallel(collect, learn)).use(task.serial(collect, learn)).run(max_step=1)
    assert tape == ["learn", "learn"]


def test_a_middleware_can_call_a_group():
    tape = Tape()
    with Task(Context()) as task:
        group = task.serial(tape.generator("a"), task.parallel(tape.generator("b")))

        def caller(ctx):
            tape("caller")
            yield from group(ctx)
            tape("/caller")

        task.use(caller).use(tape.function("inner")).run(max_step=2)
    once = ["caller", "a", "b", "inner", "/b", "/a", "/caller"]
    assert tape == once * 2


def test_the_repr_of_a_group_names_its_members():
    with Task(Context()) as task:
        group = task.parallel(task.serial(fail, fail), fail)
        assert repr(group) == "parallel(serial, fail)"


@pytest.mark.parametrize(("lock", "outcome"), [(None, "met"), (threading.Lock(), "alone")])
def test_middleware_that_share_a_lock_exclude_each_other(lock, outcome):
    tape = Tape()
    barrier = threading.Barrier(2)

    def meet(ctx):
        try:
            barrier.wait(DEADLINE_S if lock is None else 0.05)
            tape("met")
        except threading.BrokenBarrierError:
            tape("alone")

    with Task(Context()) as task:
        pair = [task.wrap(meet, lock=lock) for _ in range(2)]
        task.use(task.parallel(*pair)).run(max_step=1)
    assert tape == [outcome, outcome]


def test_the_lock_is_held_while_the_code_runs_and_not_in_between():
    lock = threading.Lock()
    tape = Tape()

    def locked(ctx):
        tape(lock.locked())
        yield
        tape(lock.locked())

    with Task(Context()) as task:
        task.use(locked, lock=lock).use(lambda ctx: tape(lock.locked())).run(max_step=1)
    assert tape == [True, False, True]
    assert not lock.locked()


def test_the_lock_is_held_while_an_error_passes_and_released_afterwards():
    lock = threading.Lock()
    tape = Tape()

    def locked(ctx):
        try:
            yield
        finally:
            tape(lock.locked())

    with pytest.raises(Boom), Task(Context()) as task:
        task.use(locked, lock=lock).use(fail).run()
    assert tape == [True]
    assert not lock.locked()


def test_the_tasks_own_lock_may_be_taken_again_by_a_member():
    tape = Tape()
    with Task(Context()) as task:
        inner = task.wrap(tape.function("inner"), lock=True)
        task.use(task.serial(inner), lock=True).run(max_step=1)
    assert tape == ["inner"]


def test_waiting_too_long_for_a_lock_is_an_error_that_names_the_waiter():
    lock = threading.Lock()
    lock.acquire()
    with (
        pytest.raises(WaitTimeout, match=r"middleware 1 \(fail\) waited 0\.01 s for its lock"),
        Task(Context(), lock_timeout_s=0.01) as task,
    ):
        task.use(fail, lock=lock).run()


def test_a_parallel_that_holds_the_lock_of_its_members_is_refused():
    with Task(Context()) as task, pytest.raises(ChainError, match="wait forever for a lock"):
        task.use(task.parallel(task.wrap(fail, lock=True)), lock=True).run()


def test_a_failed_branch_ends_the_wait_of_another_with_its_error_as_the_cause():
    tape = Tape()

    def wait(ctx):
        try:
            yield from tape.generator("waits")(ctx)
        finally:
            tape("cleaned up")

    def wait_for_nothing(ctx):
        ctx.task.wait_for("never", 100.0)

    with pytest.raises(ExceptionGroup) as caught, Task(Context()) as task:
        task.use(task.parallel(task.serial(wait, wait_for_nothing), fail)).run()
    waiting, failed = caught.value.exceptions
    assert isinstance(waiting, EventError)
    assert waiting.__cause__ is failed
    assert isinstance(failed, Boom)
    assert "cleaned up" in tape


def test_a_failed_branch_ends_a_wait_in_a_parallel_within_another_branch():
    with pytest.raises(ExceptionGroup) as caught, Task(Context()) as task:
        inner = task.parallel(lambda ctx: ctx.task.wait_for("never", 100.0), lambda ctx: None)
        task.use(task.parallel(inner, fail)).run()
    assert caught.value.split(Boom)[0] is not None


def test_a_branch_may_wait_while_it_cleans_up_after_a_failure():
    arrived = []

    def emit_until(done, emit):
        while not done.wait(0.05):
            emit("reply")

    def careful(ctx):
        try:
            yield
        finally:
            done = threading.Event()
            threading.Thread(target=emit_until, args=(done, ctx.task.emit)).start()
            arrived.append(ctx.task.wait_for("reply", 100.0))
            done.set()

    with pytest.raises(ExceptionGroup), Task(Context()) as task:
        task.use(task.parallel(task.serial(careful, fail), careful)).run()
    assert len(arrived) == 2
