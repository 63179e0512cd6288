"""Named parts of a chain: each has a context of its own, and nobody else sees its fields."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from dmiddleware.errors import ChainError, ContextError, MiddlewareError
from dmiddleware.pipeline import ChainView, Context, Task, kept, middleware, produced, renewed


@dataclass
class Kitchen(Context):
    dishes: int = kept(0, summed=True)
    cook: str = kept("nobody")
    meal: str | None = produced()
    spices: list[str] = renewed(default_factory=list)


@dataclass(kw_only=True)
class Restaurant(Context):
    address: str
    tables: int = kept(4)


def cook(part: str | None, dishes: int = 1) -> Any:
    @middleware(part_name=part, writes=("meal", "dishes"))
    def cook(ctx: Kitchen) -> None:
        ctx.meal = f"{ctx.cook}'s meal"
        ctx.dishes += dishes
        ctx.log("heat", ctx.total_step)

    return cook


def eat(part: str | None, eaten: list[str | None]) -> Any:
    @middleware(part_name=part, reads=("meal",))
    def eat(ctx: Kitchen) -> None:
        eaten.append(ctx.meal)

    return eat


def test_a_part_has_its_own_value_of_every_field() -> None:
    ctx = Kitchen()
    red, blue = ctx.part("red"), ctx.part("blue")
    red.cook, red.meal = "Ann", "soup"
    red.spices.append("salt")
    assert type(red) is Kitchen
    assert (blue.cook, blue.meal, blue.spices) == ("nobody", None, [])
    assert (ctx.cook, ctx.meal, ctx.spices) == ("nobody", None, [])
    assert ctx.part("red") is red
    assert list(ctx.parts) == ["red", "blue"]


def test_a_part_is_renewed_with_the_chain() -> None:
    ctx = Kitchen()
    ctx.part("red").cook, ctx.part("red").meal = "Ann", "soup"
    ctx.part("red").log("heat", 3)
    after = ctx.renew()
    red = after.part("red")
    assert (red.cook, red.meal, red.logged, after.logged) == ("Ann", None, {}, {})
    assert red.total_step == after.total_step == 1
    assert red.whole is after
    red.log("heat", 4)
    assert after.logged == {"red/heat": 4.0}
    assert ctx.logged == {"red/heat": 3.0}


def test_a_part_begins_in_the_step_in_which_it_is_first_used() -> None:
    ctx = Kitchen().renew().renew()
    assert ctx.part("red").total_step == 2


def test_a_part_shares_only_fields_that_have_no_first_value() -> None:
    ctx = Restaurant(address="Main Street", tables=9)
    assert (ctx.part("red").address, ctx.part("red").tables) == ("Main Street", 4)


def test_the_parts_of_a_part_are_those_of_the_whole_chain() -> None:
    ctx = Kitchen()
    red = ctx.part("red")
    assert red.part("red") is red
    assert red.part("blue") is ctx.part("blue")
    assert red.parts == ctx.parts


@pytest.mark.parametrize("name", ["", "red/blue", "red:1", " red", "r" * 65, None, 3])
def test_a_name_that_metrics_and_files_cannot_begin_with_is_refused(name: Any) -> None:
    with pytest.raises(ContextError, match="consists of letters"):
        Kitchen().part(name)
    if name is not None:
        with pytest.raises(MiddlewareError, match="consists of letters"):
            cook(name)


def test_what_a_part_logs_is_a_metric_of_the_chain_under_its_name() -> None:
    ctx = Kitchen()
    ctx.log("heat", 1)
    ctx.part("red").log("oven/heat", 2)
    assert ctx.part("red").logged == {"oven/heat": 2.0}
    assert ctx.logged == {"heat": 1.0, "red/oven/heat": 2.0}


def test_the_chain_counts_what_all_parts_count() -> None:
    with Task(Kitchen()) as task:
        task.use(cook("red", 2)).use(cook("blue", 5)).use(cook(None, 10)).run(max_step=3)
    ctx = task.ctx
    assert (ctx.dishes, ctx.part("red").dishes, ctx.part("blue").dishes) == (51, 6, 15)


def test_what_is_counted_on_the_way_back_counts() -> None:
    @middleware(part_name="red")
    def wash(ctx: Kitchen) -> Iterator[None]:
        ctx.dishes += 1
        assert ctx.whole.dishes == 4 * ctx.total_step
        yield
        ctx.dishes += 3

    with Task(Kitchen()) as task:
        task.use(wash).run(max_step=2)
    assert task.ctx.dishes == 8


def test_a_middleware_of_a_part_works_on_the_context_and_the_task_of_the_part() -> None:
    class Cook:
        part_name = "red"

        def bind(self, chain: ChainView) -> None:
            self.bound = chain

        def setup(self, task: Task[Kitchen]) -> None:
            self.task = task
            task.ctx.cook = "Ann"

        def __call__(self, ctx: Kitchen) -> None:
            self.seen = ctx
            assert ctx.task.part("red") is ctx.task

    ann = Cook()
    with Task(Kitchen()) as task:
        task.use(ann).use(cook("blue")).run(max_step=2)
        assert ann.seen is ann.task.ctx is task.ctx.part("red")
        assert ann.task.whole is task
        assert (task.ctx.cook, task.ctx.part("red").cook) == ("nobody", "Ann")
        assert list(ann.bound.middleware) == [ann]
        assert ann.bound.context is not ann.bound.whole.context
        assert len(ann.bound.whole.middleware) == 2
        assert ann.bound.whole.parts == ("red", "blue")
        ann.task.stop("enough")
        assert task.finish


def test_a_part_writes_what_it_reads() -> None:
    eaten: list[str | None] = []
    with Task(Kitchen()) as task:
        task.ctx.part("red").cook = "Ann"
        task.ctx.part("blue").cook = "Ben"
        task.use(cook("red")).use(cook("blue")).use(eat("red", eaten)).use(eat("blue", eaten))
        task.run(max_step=1)
    assert eaten == ["Ann's meal", "Ben's meal"]


def test_a_field_that_only_another_part_writes_is_refused_with_its_remedy() -> None:
    with Task(Kitchen()) as task:
        task.use(cook("red")).use(cook(None)).use(eat("blue", []))
        with pytest.raises(ChainError) as error:
            task.run(max_step=1)
    text = str(error.value)
    assert "middleware 3 (eat:blue) reads ctx.meal in the part 'blue'" in text
    assert "name='blue'" in text
    assert "middleware 1 (cook:red)" in text
    assert "middleware 2 (cook)" in text


def test_a_field_of_a_part_that_nobody_writes_is_refused() -> None:
    with Task(Kitchen()) as task:
        task.use(eat("blue", []))
        with pytest.raises(ChainError, match=r"with name='blue' before it"):
            task.run(max_step=1)


def test_a_middleware_of_no_part_can_declare_what_it_writes_for_parts() -> None:
    @middleware(writes=("red/meal", "blue/meal"))
    def cater(ctx: Kitchen) -> None:
        for name in ("red", "blue"):
            ctx.part(name).meal = name
            ctx.part(name).dishes += 1
            ctx.part(name).sum_up()

    eaten: list[str | None] = []
    with Task(Kitchen()) as task:
        task.use(cater).use(eat("red", eaten)).use(eat("blue", eaten)).run(max_step=1)
    assert eaten == ["red", "blue"]
    assert task.ctx.dishes == 2


def test_a_middleware_joins_a_part_that_others_belong_to() -> None:
    eaten: list[str | None] = []

    @middleware(joins_part="red")
    def taste(ctx: Kitchen) -> None:
        eaten.append(ctx.meal)

    with Task(Kitchen()) as task:
        task.use(cook("red")).use(taste).run(max_step=1)
        assert "taste:red" in str(task.describe())
    with Task(Kitchen()) as task:
        task.use(cook("blue")).use(taste).run(max_step=1)
        assert "taste:red" not in str(task.describe())
    assert eaten == ["nobody's meal", None]


def test_a_wrapper_sees_the_context_of_the_part() -> None:
    seen: list[Context] = []

    def spy(mw: Any) -> Any:
        def spied(ctx: Context) -> None:
            seen.append(ctx)
            mw(ctx)

        return spied

    with Task(Kitchen()) as task:
        task.use_wrapper(spy).use(cook("red")).run(max_step=1)
        assert seen == [task.ctx.part("red")]


def test_parts_run_in_groups_and_parallel_branches() -> None:
    with Task(Kitchen()) as task:
        task.use(task.parallel(*(cook(f"p{n}", n) for n in range(1, 5))))
        task.use(task.serial(cook("p1"), cook("p2"))).run(max_step=20)
    assert [part.dishes for part in task.ctx.parts.values()] == [40, 60, 60, 80]
    assert task.ctx.dishes == 240


@pytest.mark.parametrize(
    ("roles", "active"),
    [
        ((), ["cook:red", "cook:blue", "cook"]),
        (("chef",), ["cook:red", "cook:blue", "cook"]),
        (("chef:red",), ["cook:red"]),
        (("chef:red", "chef:blue"), ["cook:red", "cook:blue"]),
        (("chef", "chef:red"), ["cook:red", "cook:blue", "cook"]),
    ],
)
def test_a_part_runs_in_the_processes_for_it(roles: tuple[str, ...], active: list[str]) -> None:
    with Task(Kitchen(), roles=roles) as task:
        for part in ("red", "blue", None):
            task.use(cook(part), roles=("chef",))
        rows = task.describe().rows
    assert [row.name for row in rows if row.active] == active


def test_the_state_of_a_task_has_the_states_of_its_parts() -> None:
    def build() -> Task[Kitchen]:
        task = Task(Kitchen())
        task.use(cook("red", 2)).use(cook("blue", 5))
        return task

    with build() as task:
        task.ctx.part("red").keep("extra")
        task.ctx.part("red").extra = 7  # type: ignore[attr-defined]
        task.run(max_step=2)
        state = pickle.loads(pickle.dumps(task.state_dict()))
    with build() as resumed:
        resumed.load_state_dict(state)
        resumed.run(max_step=1)
    ctx = resumed.ctx
    assert (ctx.dishes, ctx.part("red").dishes, ctx.part("blue").dishes) == (21, 6, 15)
    assert ctx.part("red").total_step == ctx.total_step == 2
    assert ctx.part("red").extra == 7  # type: ignore[attr-defined]


def test_the_state_of_a_chain_without_parts_is_what_it_was() -> None:
    assert Kitchen().state_dict().keys() == {"values", "also_kept"}


def test_the_states_of_middleware_are_kept_apart_by_their_parts() -> None:
    class Pot:
        def __init__(self, part: str | None) -> None:
            self.part_name = part
            self.filled = ""

        def __call__(self, ctx: Context) -> None:
            self.filled = str(self.part_name)

        def state_dict(self) -> str:
            return self.filled

        def load_state_dict(self, state: str) -> None:
            self.filled = state

    with Task(Kitchen()) as task:
        task.use(Pot("red")).use(Pot("blue")).use(Pot(None)).run(max_step=1)
        state = task.state_dict()
    assert state["middleware"] == {"Pot:red": "red", "Pot:blue": "blue", "Pot": "None"}
    blue, red = Pot("blue"), Pot("red")
    with Task(Kitchen()) as task:
        task.use(Pot(None)).use(blue).use(red).load_state_dict(state)
        assert (red.filled, blue.filled) == ("red", "blue")


def test_a_context_with_parts_can_be_pickled() -> None:
    ctx = Kitchen()
    ctx.part("red").cook = "Ann"
    ctx.part("red").log("heat", 1)
    copied = pickle.loads(pickle.dumps(ctx))
    assert copied.part("red").cook == "Ann"
    assert copied.logged == {"red/heat": 1.0}
    assert copied.part("red").whole is copied
