"""Middleware: which objects are accepted, and their declarations."""

from __future__ import annotations

import functools
from collections.abc import Callable
from enum import StrEnum

import pytest

from dmiddleware import Context, Middleware, MiddlewareError, Task, middleware
from dmiddleware.pipeline import middleware_location, middleware_name
from middleware import Role


def step(ctx):
    pass


class Collector:
    roles = (Role.COLLECTOR,)

    def __init__(self, env=None):
        self.env = env

    def __call__(self, ctx):
        pass


def pusher(buffer, *, size) -> Middleware[Context]:
    @middleware(reads=("trajectories",))
    def push(ctx):
        pass

    return push


def fetcher(buffer) -> Callable[[Context], None]:
    return step


def generator(ctx):
    yield


async def asynchronous(ctx):
    pass


async def asynchronous_generator(ctx):
    yield


class Asynchronous:
    async def __call__(self, ctx):
        pass


@pytest.mark.parametrize(
    ("candidate", "remedy"),
    [
        (None, "return statement"),
        (generator(None), r"pass the function itself: use\(generator\), not use\(generator\(ctx\)"),
        (Collector, r"it is a class; pass an instance: use\(Collector\(\.\.\.\)\)"),
        (3, "an? int is not callable"),
        ("step", "an? str is not callable"),
        (pusher, r"returns a middleware; call it: use\(pusher\(\.\.\.\)\)"),
        (fetcher, r"returns a middleware; call it: use\(fetcher\(\.\.\.\)\)"),
        (asynchronous, "it is asynchronous"),
        (asynchronous_generator, "it is asynchronous"),
        (Asynchronous(), "it is asynchronous"),
        (lambda: None, "does not take the context as its only argument"),
        (lambda ctx, buffer: None, "does not take the context as its only argument"),
        (lambda *, every: None, "does not take the context as its only argument"),
    ],
)
def test_an_object_that_is_not_a_middleware_is_refused_with_a_remedy(candidate, remedy):
    with pytest.raises(MiddlewareError, match=remedy):
        Task(Context()).use(candidate)


@pytest.mark.parametrize(
    "candidate",
    [
        step,
        generator,
        Collector(),
        pusher([], size=3),
        lambda ctx, size=3: None,
        lambda *args: None,
        functools.partial(lambda size, ctx: None, 3),
        print,
    ],
)
def test_any_callable_that_takes_the_context_is_a_middleware(candidate):
    Task(Context()).use(candidate)


def test_the_decorator_declares_and_changes_nothing_else():
    def learn(ctx):
        return None

    declared = middleware(roles=[Role.LEARNER], reads=("a", "b"), writes="c")(learn)
    assert declared is learn
    assert (learn.roles, learn.reads, learn.writes) == (("learner",), ("a", "b"), ("c",))


def test_the_decorator_declares_for_a_class():
    @middleware(reads=("a",))
    class Reader:
        def __call__(self, ctx):
            pass

    assert Reader().reads == ("a",)


def test_decorating_a_factory_as_if_it_were_a_middleware_is_refused():
    with pytest.raises(MiddlewareError, match="decorate the one that it returns"):

        @middleware(reads=("a",))
        def build(buffer, *, size):
            return step


def test_roles_are_strings():
    class MyRole(StrEnum):
        TEACHER = "teacher"

    with Task(Context(), roles=(MyRole.TEACHER,)) as task:
        assert task.has_role("teacher")


def test_names_are_those_in_the_source_code():
    assert middleware_name(step) == "step"
    assert middleware_name(Collector()) == "Collector"
    assert middleware_name(functools.partial(step)) == "step"
    assert middleware_name(pusher([], size=1)) == "push"
    assert middleware_name(Collector().__call__) == "__call__"


def test_locations_lead_to_the_definition():
    line = step.__code__.co_firstlineno
    assert middleware_location(step).endswith(f"test_middleware.py:{line}")
    assert middleware_location(functools.partial(step)).endswith(f"test_middleware.py:{line}")
    call_line = Collector.__call__.__code__.co_firstlineno
    assert middleware_location(Collector()).endswith(f"test_middleware.py:{call_line}")
    assert middleware_location(print) == ""


class Agent:
    """An object whose methods are middleware."""

    roles = (Role.LEARNER,)
    reads = ("obs",)

    @middleware(roles=(Role.COLLECTOR,), writes=("trajectories",))
    def collect(self, ctx):
        pass

    @middleware(reads=("train_data",))
    def learn(self, ctx):
        yield

    def log(self, ctx):
        pass


def declarations_of(mw):
    with Task(Context(), roles=(Role.COLLECTOR,)) as task:
        (row,) = task.use(mw).describe().rows
    return row.roles, row.reads, row.writes


def test_a_method_can_be_declared():
    agent = Agent()
    assert declarations_of(agent.collect) == (("collector",), (), ("trajectories",))
    assert declarations_of(agent.learn) == ((), ("train_data",), ())


def test_a_method_that_declares_nothing_has_the_declarations_of_its_object():
    assert declarations_of(Agent().log) == (("learner",), ("obs",), ())


def test_a_partial_has_the_declarations_of_its_function():
    @middleware(roles=(Role.LEARNER,), reads=("a",), writes=("b",))
    def learn(ctx, rate):
        pass

    assert declarations_of(functools.partial(learn, rate=1)) == (("learner",), ("a",), ("b",))
    nested = functools.partial(functools.partial(Agent().collect))
    assert declarations_of(nested) == (("collector",), (), ("trajectories",))


def test_a_partial_is_inactive_in_other_roles():
    @middleware(roles=(Role.LEARNER,))
    def learn(ctx, rate):
        raise AssertionError("never called")

    with Task(Context(), roles=(Role.COLLECTOR,)) as task:
        task.use(functools.partial(learn, rate=1)).use(Agent().collect).run(max_step=1)


def test_a_lambda_that_returns_a_coroutine_is_refused_in_the_first_step():
    with (
        pytest.raises(MiddlewareError, match=r"coroutine.*not asynchronous"),
        Task(Context()) as task,
    ):
        task.use(lambda ctx: asynchronous(ctx)).run(max_step=1)


def test_a_partial_of_a_coroutine_function_is_refused():
    with pytest.raises(MiddlewareError, match="it is asynchronous"):
        Task(Context()).use(functools.partial(asynchronous))
