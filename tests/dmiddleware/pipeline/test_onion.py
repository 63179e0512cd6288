"""One step through a chain, forward and back, and the way of errors."""

from __future__ import annotations

import functools
import logging
from contextlib import contextmanager, suppress

import pytest

from dmiddleware import Context, MiddlewareError, Task
from dmiddleware.pipeline import SkipRest, around
from dmiddleware.testing import Tape


class Boom(Exception):
    pass


def run(*mws):
    with Task(Context()) as task:
        for mw in mws:
            task.use(mw)
        task.run(max_step=1)


def raising(error, tape=None):
    def fail(ctx):
        raise error

    return fail


def notes_of(error):
    return getattr(error, "__notes__", [])


def test_the_way_back_runs_in_reverse_order():
    tape = Tape()
    run(tape.generator("a"), tape.function("b"), tape.generator("c"))
    assert tape == ["a", "b", "c", "/c", "/a"]


def test_a_generator_that_never_yields_has_no_way_back():
    tape = Tape()

    def early(ctx):
        tape("early")
        if ctx.total_step < 0:
            yield

    run(tape.generator("a"), early)
    assert tape == ["a", "early", "/a"]


def test_a_plain_function_that_returns_a_generator_is_resumed():
    tape = Tape()
    generator = tape.generator("inner")
    run(lambda ctx: generator(ctx), tape.function("b"))
    assert tape == ["inner", "b", "/inner"]


def test_callable_objects_partials_and_methods_are_middleware():
    tape = Tape()

    class Collector:
        def __call__(self, ctx):
            tape("object")
            yield
            tape("/object")

        def method(self, ctx):
            tape("method")

    run(Collector(), functools.partial(lambda name, ctx: tape(name), "partial"), Collector().method)
    assert tape == ["object", "partial", "method", "/object"]


def test_return_values_are_ignored():
    run(lambda ctx: 3, lambda ctx: [1, 2], lambda ctx: iter([1]))


def test_a_returned_function_is_refused_as_a_factory_that_was_not_called():
    def build(buffer):
        def push(ctx):
            raise AssertionError("never called")

        return push

    with pytest.raises(MiddlewareError, match=r"middleware 1 \(build\) returned .*push.* call it"):
        run(build)


def test_second_yield_is_refused_with_its_function_file_and_line():
    def twice(ctx):
        yield
        yield

    line = twice.__code__.co_firstlineno + 2
    with pytest.raises(MiddlewareError) as caught:
        run(twice)
    message = str(caught.value)
    assert "middleware 1 (twice) yielded a second time" in message
    assert "twice, " in message
    assert f"{__file__} line {line}" in message


def test_a_second_yield_closes_the_generator_and_unwinds_the_others():
    tape = Tape()

    def twice(ctx):
        try:
            yield
            yield
        finally:
            tape("closed")

    with pytest.raises(MiddlewareError):
        run(tape.generator("outer"), twice)
    assert tape == ["outer", "closed", "!outer"]


def test_an_error_while_closing_after_a_second_yield_is_in_the_notes():
    def twice(ctx):
        try:
            yield
            yield
        finally:
            raise Boom("while closing")

    with pytest.raises(MiddlewareError) as caught:
        run(twice)
    assert any("Boom('while closing')" in note for note in notes_of(caught.value))


def test_an_error_is_thrown_into_every_suspended_middleware_in_reverse():
    tape = Tape()
    error = Boom("forward")
    with pytest.raises(Boom) as caught:
        run(tape.generator("a"), tape.generator("b"), raising(error), tape.function("c"))
    assert caught.value is error
    assert tape == ["a", "b", "!b", "!a"]


def test_an_error_on_the_way_back_is_thrown_only_into_those_still_suspended():
    tape = Tape()

    def late(ctx):
        yield
        raise Boom

    with pytest.raises(Boom):
        run(tape.generator("a"), late, tape.generator("c"))
    assert tape == ["a", "c", "/c", "!a"]


def test_the_error_names_the_middleware_the_direction_and_the_step():
    def late(ctx):
        yield
        if ctx.total_step == 2:
            raise Boom

    with pytest.raises(Boom) as caught, Task(Context(), name="trial") as task:
        task.use(lambda ctx: None).use(late).run()
    assert notes_of(caught.value) == [
        "in middleware 2 (late) on the way back",
        "in step 2 of the task 'trial'",
    ]


def test_the_traceback_leads_to_the_error_without_detours():
    def outer(ctx):
        yield

    def fail(ctx):
        raise Boom

    with pytest.raises(Boom) as caught:
        run(outer, outer, fail)
    functions = [entry.name for entry in caught.traceback]
    assert functions[-1] == "fail"
    assert "outer" not in functions
    assert "unwind" not in functions


def test_an_error_cannot_be_swallowed():
    tape = Tape()

    def swallow(ctx):
        try:
            yield
        except Boom:
            tape("caught")

    error = Boom()
    with pytest.raises(Boom) as caught:
        run(tape.generator("outer"), swallow, raising(error))
    assert caught.value is error
    assert tape == ["outer", "caught", "!outer"]
    assert any("(swallow) caught it" in note for note in notes_of(error))


def test_an_error_can_be_translated():
    tape = Tape()

    def translate(ctx):
        try:
            yield
        except Boom as error:
            raise LookupError("better words") from error

    def outer(ctx):
        try:
            yield
        except LookupError:
            tape("outer sees the translation")
            raise

    error = Boom()
    with pytest.raises(LookupError) as caught:
        run(outer, translate, raising(error))
    assert caught.value.__cause__ is error
    assert tape == ["outer sees the translation"]
    assert "in middleware 2 (translate) while an error passed through it" in notes_of(caught.value)


def test_an_error_raised_while_unwinding_is_grouped_with_the_first():
    seen = Tape()

    def outer(ctx):
        try:
            yield
        except Exception as error:
            seen(error)
            raise

    def careless(ctx):
        try:
            yield
        finally:
            raise KeyError("careless")

    first = Boom("first")
    with pytest.raises(ExceptionGroup) as caught:
        run(outer, careless, careless, raising(first))
    boom, *others = caught.value.exceptions
    assert boom is first
    assert [type(error) for error in others] == [KeyError, KeyError]
    assert "in middleware 3 (careless) while an error passed through it" in notes_of(others[0])
    assert "in middleware 2 (careless) while an error passed through it" in notes_of(others[1])
    assert seen == [first]


def test_yielding_again_when_an_error_is_thrown_in_is_refused_in_addition_to_the_error():
    def stubborn(ctx):
        try:
            yield
        except Boom:
            yield

    with pytest.raises(ExceptionGroup) as caught:
        run(stubborn, raising(Boom()))
    boom, second = caught.value.exceptions
    assert isinstance(boom, Boom)
    assert isinstance(second, MiddlewareError)
    assert "yielded a second time" in str(second)


def test_an_interrupt_is_never_wrapped(caplog):
    def careless(ctx):
        try:
            yield
        finally:
            raise Boom("careless")

    interrupt = KeyboardInterrupt()
    with caplog.at_level(logging.ERROR), pytest.raises(KeyboardInterrupt) as caught:
        run(careless, raising(interrupt))
    assert caught.value is interrupt
    assert "another error: Boom('careless')" in notes_of(interrupt)
    assert "Boom: careless" in caplog.text


def test_an_interrupt_while_unwinding_replaces_the_error(caplog):
    def careless(ctx):
        try:
            yield
        finally:
            raise SystemExit(3)

    with pytest.raises(SystemExit) as caught:
        run(careless, raising(Boom("first")))
    assert caught.value.code == 3
    assert "another error: Boom('first')" in notes_of(caught.value)


def test_stop_iteration_from_a_function_is_not_taken_for_the_end_of_a_generator():
    tape = Tape()

    def exhausted(ctx):
        next(iter(()))

    with pytest.raises(RuntimeError, match="raised StopIteration") as caught:
        run(tape.generator("a"), exhausted)
    assert isinstance(caught.value.__cause__, StopIteration)
    assert "in middleware 2 (exhausted)" in notes_of(caught.value)
    assert tape == ["a", "!a"]


def test_the_same_error_object_raised_again_is_not_noted_twice():
    error = Boom()
    with Task(Context()) as task:
        task.use(raising(error))
        for _ in range(2):
            with pytest.raises(Boom):
                task.run(max_step=1)
    assert notes_of(error).count("in middleware 1 (fail)") == 1


def test_a_failed_step_does_not_affect_the_next_run():
    tape = Tape()

    def sometimes(ctx):
        tape(ctx.total_step)
        if ctx.total_step == 0:
            raise Boom

    with Task(Context()) as task:
        task.use(sometimes)
        with pytest.raises(Boom):
            task.run()
        task.run(max_step=1)
    assert tape == [0, 1]


@pytest.mark.parametrize("error", [None, Boom()])
def test_around_guards_both_halves(error):
    tape = Tape()

    @contextmanager
    def guard(ctx, direction):
        tape(f"<{direction}")
        try:
            yield
        finally:
            tape(f"{direction}>")

    def fail(ctx):
        if error is not None:
            raise error

    chain = (around(tape.generator("a"), guard), fail)
    if error is None:
        run(*chain)
        assert tape == ["<forward", "a", "forward>", "<back", "/a", "back>"]
    else:
        with pytest.raises(Boom) as caught:
            run(*chain)
        assert caught.value is error
        assert tape == ["<forward", "a", "forward>", "<back", "!a", "back>"]


def test_around_keeps_the_name_and_runs_functions():
    tape = Tape()

    @contextmanager
    def guard(ctx, direction):
        tape(direction)
        yield

    guarded = around(tape.function("plain"), guard)
    assert guarded.__name__ == "plain"
    run(guarded)
    assert tape == ["forward", "plain"]


def test_around_refuses_a_second_yield_and_hides_no_error():
    @contextmanager
    def guard(ctx, direction):
        yield

    def twice(ctx):
        yield
        yield

    def stubborn(ctx):
        try:
            yield
        except Boom:
            yield

    def swallow(ctx):
        with suppress(Boom):
            yield

    with pytest.raises(MiddlewareError, match="twice yielded a second time"):
        run(around(twice, guard))
    with pytest.raises(ExceptionGroup) as caught:
        run(around(stubborn, guard), raising(Boom()))
    assert [type(error) for error in caught.value.exceptions] == [Boom, MiddlewareError]
    with pytest.raises(Boom):
        run(around(swallow, guard), raising(Boom()))


def test_the_rest_of_the_way_forward_can_be_skipped_without_an_error():
    tape = Tape()

    def nothing_to_do(ctx):
        raise SkipRest

    run(tape.generator("a"), nothing_to_do, tape.function("b"))
    assert tape == ["a", "/a"]


def test_in_a_parallel_only_the_rest_of_the_branch_is_skipped():
    tape = Tape()

    def nothing_to_do(ctx):
        raise SkipRest

    with Task(Context()) as task:
        task.use(task.parallel(task.serial(nothing_to_do, tape.function("b"))))
        task.use(tape.function("c"))
        task.run(max_step=1)
    assert tape == ["c"]
