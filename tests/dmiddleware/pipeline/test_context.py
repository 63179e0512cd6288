"""Contexts: kept and renewed fields, missing fields, metrics and state."""

from __future__ import annotations

import copy
import pickle
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from dmiddleware import Context, ContextError, Task, kept, produced, renewed
from dmiddleware.errors import MiddlewareError
from middleware import OnlineRLContext


@dataclass
class MyContext(OnlineRLContext):
    visits: dict = kept(default_factory=dict)
    novelty: float = renewed(0.5)
    batch: list = renewed(default_factory=list)
    result: list | None = produced()
    plain: int = 7
    nested: dict = field(default_factory=dict)


def test_kept_fields_carry_over_and_others_are_reset_to_their_defaults():
    ctx = MyContext()
    ctx.env_step = 10
    ctx.visits["a"] = 1
    ctx.novelty, ctx.plain, ctx.result = 0.9, 8, [1]
    ctx.batch.append(1)
    ctx.nested["k"] = 1
    new = ctx.renew()
    assert new is not ctx
    assert type(new) is MyContext
    assert (new.env_step, new.visits) == (10, {"a": 1})
    assert new.visits is ctx.visits
    assert (new.novelty, new.plain, new.result, new.batch, new.nested) == (0.5, 7, None, [], {})
    assert new.batch is not ctx.batch
    assert ctx.novelty == 0.9, "the old context is left as it was"


def test_steps_are_counted():
    assert Context().renew().renew().total_step == 2


def test_keep_carries_a_field_over_to_all_later_steps():
    ctx = OnlineRLContext()
    ctx.train_data = [1]
    ctx.own = "x"
    ctx.keep("train_data", "own")
    third = ctx.renew().renew()
    assert (third.train_data, third.own) == ([1], "x")


def test_keep_can_be_called_before_the_field_is_set():
    ctx = Context()
    ctx.keep("own")
    ctx = ctx.renew()
    ctx.own = 1
    assert ctx.renew().own == 1


def test_an_assigned_field_lasts_for_one_step():
    ctx = Context()
    ctx.own = 1
    assert ctx.own == 1
    with pytest.raises(ContextError, match=r"ctx\.own was never set"):
        ctx.renew().own  # noqa: B018 (reading it is what raises)


def test_the_error_for_a_missing_field_suggests_similar_names():
    ctx = OnlineRLContext()
    with pytest.raises(AttributeError, match="did you mean train_data") as caught:
        ctx.train_dat  # noqa: B018 (reading it is what raises)
    assert isinstance(caught.value, ContextError)
    assert "OnlineRLContext" in str(caught.value)
    ctx.novelty_bonus = 1
    with pytest.raises(ContextError, match="did you mean novelty_bonus"):
        ctx.novelty_bonsu  # noqa: B018 (reading it is what raises)


def test_the_error_for_a_missing_field_suggests_nothing_if_no_name_is_similar():
    with pytest.raises(ContextError) as caught:
        Context().zzz  # noqa: B018 (reading it is what raises)
    assert "did you mean" not in str(caught.value)


def test_hasattr_and_getattr_with_a_default_work():
    ctx = Context()
    assert not hasattr(ctx, "own")
    assert getattr(ctx, "own", 5) == 5


def test_metrics_are_numbers_and_last_for_the_step():
    ctx = Context()
    ctx.log("loss", np.float32(0.5))
    ctx.log("return", 1)
    ctx.log("return", 2)
    assert ctx.logged == {"loss": 0.5, "return": 2.0}
    assert all(type(value) is float for value in ctx.logged.values())
    assert ctx.renew().logged == {}


@pytest.mark.parametrize(
    "value",
    [
        2,
        2.0,
        True + 1,
        np.float32(2.0),
        np.int64(2),
        np.array(2.0),
        np.array([2.0]),
        np.array([[2]], np.uint8),
        Fraction(2),
    ],
    ids=repr,
)
def test_a_scalar_of_any_kind_and_shape_is_logged(value: Any) -> None:
    ctx = OnlineRLContext()
    ctx.log("metric", value)
    assert ctx.logged == {"metric": 2.0}


@pytest.mark.parametrize("value", [None, "2.0", [2.0], np.array([1.0, 2.0]), np.array([]), 2j])
def test_logging_what_is_not_one_number_names_the_metric(value: Any) -> None:
    with pytest.raises(TypeError, match="'metric'"):
        OnlineRLContext().log("metric", value)


@pytest.mark.parametrize(
    "value",
    [10**400, np.array(["2.0"]), np.array(["a"]), b"2", bytearray(b"2"), {"a": 1}, {1}, print],
    ids=lambda value: repr(value)[:20],
)
def test_what_only_looks_like_a_number_is_not_logged(value: Any) -> None:
    with pytest.raises(MiddlewareError, match=r"'metric'.* takes one number"):
        OnlineRLContext().log("metric", value)


@pytest.mark.parametrize("name", ["loss", "a/b/c", "disk/free_bytes", "x-1.5", "ε/größe", "A"])
def test_a_name_has_words_in_groups(name: str) -> None:
    ctx = OnlineRLContext()
    ctx.log(name, 1.0)
    assert ctx.logged == {name: 1.0}


@pytest.mark.parametrize(
    ("name", "better"),
    [
        ("", "group/name"),
        ("/", "group/name"),
        ("/loss", "loss"),
        ("loss/", "loss"),
        ("a//b", "a/b"),
        (" loss", "loss"),
        ("my loss", "my_loss"),
        ("a / b", "a/b"),
        ("loss\n", "loss"),
        ("loss (mean)", "loss_mean_"),
        ("50%", "50_"),
        ("a\\b", "a_b"),
        ("a:b", "a_b"),
        ("[histogram]loss", "_histogram_loss"),
        ("a\0b", "a_b"),
    ],
)
def test_another_name_is_refused_with_one_that_would_do(name: str, better: str) -> None:
    ctx = OnlineRLContext()
    with pytest.raises(MiddlewareError, match="the name of a metric") as caught:
        ctx.log(name, 1.0)
    assert str(caught.value).endswith(repr(better))
    assert ctx.logged == {}


@pytest.mark.parametrize("name", [None, 3, ("a", "b"), b"loss", ["loss"], 1.5])
def test_a_name_that_is_not_a_text_is_refused(name: Any) -> None:
    with pytest.raises(MiddlewareError, match="the name of a metric is a text, got"):
        OnlineRLContext().log(name, 1.0)


@pytest.mark.parametrize("name", ["env_step", "train_iter", "time_s"])
def test_a_name_of_a_column_of_every_row_is_refused(name: str) -> None:
    with pytest.raises(MiddlewareError, match=f"would replace the column {name} .*'my/{name}'"):
        OnlineRLContext().log(name, 1.0)


def test_the_task_is_set_once_it_has_the_context_and_is_kept():
    ctx = OnlineRLContext()
    with pytest.raises(ContextError, match="does not belong to a task yet"):
        ctx.task  # noqa: B018 (reading it is what raises)
    task = Task(ctx)
    assert ctx.task is task
    assert ctx.renew().renew().task is task


def test_a_context_is_pickled_without_its_task():
    ctx = MyContext(env_step=4)
    ctx.own = 1
    Task(ctx)
    for other in (pickle.loads(pickle.dumps(ctx)), copy.copy(ctx)):
        assert (other.env_step, other.own, other.visits) == (4, 1, {})
        assert not hasattr(other, "task")
    assert ctx.renew().env_step == 4


def test_the_state_has_the_fields_that_carry_over():
    ctx = MyContext(env_step=4, visits={"a": 1}, novelty=0.9)
    ctx.own = "x"
    ctx.keep("own")
    Task(ctx)
    state = ctx.state_dict()
    assert set(state["values"]) == {
        "total_step", "env_step", "env_episode", "train_iter", "last_eval_iter",
        "last_eval_value", "visits", "own", "trained_env_step",
    }  # fmt: skip
    other = MyContext()
    other.load_state_dict(state)
    assert (other.env_step, other.visits, other.own, other.novelty) == (4, {"a": 1}, "x", 0.5)
    assert other.renew().own == "x"


def test_a_subclass_that_is_not_a_dataclass_is_refused():
    class Forgotten(OnlineRLContext):
        novelty: float = renewed(0.0)

    with pytest.raises(TypeError, match=r"Forgotten declares context fields .* @dataclass"):
        Forgotten()


def test_a_subclass_with_methods_only_needs_no_decorator():
    class Helpful(OnlineRLContext):
        def steps_left(self):
            return 10 - self.env_step

    assert Helpful().renew().steps_left() == 10


def test_subclasses_of_subclasses_are_renewed_with_their_own_fields():
    @dataclass
    class Base(Context):
        a: int = kept(0)
        b: int = renewed(1)

    @dataclass
    class Derived(Base):
        b: int = kept(2)  # another kind than in the base class
        c: int = renewed(3)

    base, derived = Base(), Derived()
    base.a = base.b = 9
    derived.a = derived.b = derived.c = 9
    base, derived = base.renew(), derived.renew()
    assert (base.a, base.b) == (9, 1)
    assert (derived.a, derived.b, derived.c) == (9, 9, 3)


def test_a_field_without_a_default_is_kept():
    @dataclass(kw_only=True)
    class Named(Context):
        name: str

    ctx = Named(name="x")
    assert ctx.renew().name == "x"


def test_a_deleted_field_stays_deleted():
    ctx = OnlineRLContext()
    del ctx.env_step
    new = ctx.renew()
    # The class's default shows through, as with any dataclass.
    assert "env_step" not in vars(new)


def test_is_kept_and_has_value():
    ctx = OnlineRLContext()
    assert ctx.is_kept("env_step")
    assert not ctx.is_kept("train_data")
    ctx.keep("train_data")
    assert ctx.is_kept("train_data")
    assert not ctx.has_value("train_data")
    ctx.train_data = 0
    assert ctx.has_value("train_data")
    assert not ctx.has_value("nonsense")


def test_the_error_of_a_missing_field_keeps_its_message_when_pickled():
    with pytest.raises(ContextError) as caught:
        OnlineRLContext().train_dat  # noqa: B018 (reading it is what raises)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_a_context_with_slots_is_refused():
    @dataclass(slots=True)
    class Slotted(Context):
        visits: int = kept(0)

    with pytest.raises(TypeError, match=r"Slotted has __slots__.* without slots=True"):
        Slotted()


def test_the_state_keeps_the_types_of_collections():
    @dataclass
    class Counting(Context):
        visits: Counter = kept(default_factory=Counter)
        rewards: defaultdict = kept(default_factory=lambda: defaultdict(float))

    ctx, restored = Counting(), Counting()
    ctx.visits["a"] += 1
    ctx.rewards["b"] += 0.5
    restored.load_state_dict(ctx.state_dict())
    restored.visits["c"] += 1
    restored.rewards["d"] += 1.0
    assert restored.visits == Counter("ac")
    assert restored.rewards == {"b": 0.5, "d": 1.0}
