"""Arguments of events that change later: handlers get what was emitted, in every process."""

from __future__ import annotations

import threading
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from easydict import EasyDict

from dmiddleware import Context, Task
from dmiddleware.data import as_tree, to_dict
from dmiddleware.event_values import copied_arguments
from dmiddleware.testing import Cluster


class Pair(NamedTuple):
    name: str
    array: Any


def make_values() -> dict[str, Any]:
    """Return values of each kind that a router carries; all of their numbers are ones."""
    return {
        "array": np.ones(3),
        "a part of a larger array": np.ones((4, 3))[:, 1],
        "array without dimensions": np.array(1.0),
        "tensor": torch.ones(2, 2),
        "half tensor": torch.ones(2, dtype=torch.bfloat16),
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "result of a module": torch.nn.Parameter(torch.ones(2)) * 1.0,
        "tree": as_tree({"obs": {"image": torch.ones(2, 2)}, "reward": np.ones(2)}),
        "list of arrays": [np.ones(2), torch.ones(2)],
        "tuple in a dictionary": {"a": (np.ones(2), {"b": [torch.ones(1)]})},
        "state of a module": OrderedDict(weight=torch.ones(2, 2), bias=torch.ones(2)),
        "list of numbers": [1.0, 1.0],
        "dictionary of numbers": {"a": 1.0, "b": {"c": 1.0}},
    }


def change(value: Any) -> None:
    """Overwrite all numbers of a value with zeros, in place."""
    if isinstance(value, tuple | list):
        for number, item in enumerate(value):
            if isinstance(item, float):
                value[number] = 0.0  # type: ignore[index]
            else:
                change(item)
    elif isinstance(value, dict):
        for key, item in value.items():
            if isinstance(item, float):
                value[key] = 0.0
            else:
                change(item)
    elif isinstance(value, np.ndarray):
        value[...] = 0.0
    elif isinstance(value, torch.Tensor):
        with torch.no_grad():
            value.zero_()
    else:
        change(to_dict(value))


def numbers(value: Any) -> Iterator[float]:
    if isinstance(value, float):
        yield value
    elif isinstance(value, np.ndarray | torch.Tensor):
        yield from torch.as_tensor(value).double().flatten().tolist()
    elif isinstance(value, list | tuple | dict):
        for item in value.values() if isinstance(value, dict) else value:
            yield from numbers(item)
    else:
        yield from numbers(to_dict(value))


class Received:
    """Handlers of two events: what they got, and what its numbers were in the second handler."""

    def __init__(self, task: Task[Any]) -> None:
        self.values: list[Any] = []
        self.clock = task.clock
        self.changed = threading.Condition()
        self.has_ended = False
        task.on("value", self.values.append)
        task.on("keyword", lambda *, value: self.values.append(value))
        task.on("end", self.end)

    def end(self) -> None:
        with self.changed:
            self.has_ended = True
            self.changed.notify_all()

    def wait(self) -> None:
        with self.changed:
            assert self.clock.wait_for(self.changed, lambda: self.has_ended, 30.0)


def emit_and_change(task: Task[Any], value: Any, **where: Any) -> None:
    task.emit("value", value, **where)
    task.emit("keyword", value=value, **where)
    change(value)
    task.emit("end", **where)


def in_one_process(value: Any) -> list[Any]:
    with Task(Context()) as task:
        free = threading.Event()
        # The handlers run only when the value has changed.
        task.on("value", lambda value: free.wait(60.0))
        received = Received(task)
        emit_and_change(task, value)
        free.set()
        task.sync()
        return received.values


def from_another_process(value: Any, *, only_local: bool = False) -> list[Any]:
    results: list[Any] = []

    def program() -> None:
        with Task(Context()) as task:
            assert task.router is not None
            received = Received(task)
            receives = (task.router.node_id == 0) == only_local

            def step(ctx: Context) -> None:
                if ctx.total_step == 0 and task.router.node_id == 0:  # type: ignore[union-attr]
                    where = {"only_local": True} if only_local else {"only_remote": True}
                    emit_and_change(task, value, **where)
                if receives:
                    received.wait()

            task.use(step).run(max_step=2)
            if receives:
                results.extend(received.values)

    with Cluster(program, n=2) as cluster:
        cluster.run()
    return results


def with_a_router_and_only_local(value: Any) -> list[Any]:
    return from_another_process(value, only_local=True)


@pytest.mark.parametrize("kind", make_values())
@pytest.mark.parametrize(
    "emitted", [in_one_process, with_a_router_and_only_local, from_another_process]
)
def test_handlers_get_what_was_emitted_whatever_changes_later(
    emitted: Callable[[Any], list[Any]], kind: str
) -> None:
    value = make_values()[kind]
    arrived = emitted(value)
    assert len(arrived) == 2
    assert set(numbers(value)) == {0.0}
    for one in arrived:
        assert set(numbers(one)) == {1.0}
        if isinstance(value, torch.Tensor):
            assert type(one) is torch.Tensor and one.dtype is value.dtype
            assert not one.requires_grad
        else:
            assert type(one) is type(value)


def test_a_handler_may_change_what_it_gets() -> None:
    values = make_values()
    with Task(Context()) as task:
        task.on("value", change)
        task.emit("value", values)
        task.sync()
    assert set(numbers(values)) == {1.0}


def test_what_only_one_process_can_use_is_passed_as_it_is() -> None:
    class Model:
        pass

    model, lock, both = Model(), threading.Lock(), Pair("x", np.ones(2))
    loop: list[Any] = [1.0]
    loop.append(loop)
    counts = defaultdict(list, a=[1.0])
    config = EasyDict(a=EasyDict(b=[1.0]))
    (a, b, c, d, e), kwargs = copied_arguments((model, [lock], both, loop, counts), {"f": config})
    assert a is model and b[0] is lock
    assert type(c) is Pair and c.array is not both.array
    assert d is not loop and d[1] is d
    assert type(e) is defaultdict and e["a"] is not counts["a"] and e["b"] == []
    assert type(kwargs["f"]) is EasyDict and kwargs["f"].a.b is not config.a.b
    assert kwargs["f"] == config


def test_a_small_part_of_a_large_array_is_copied_alone() -> None:
    large = torch.ones(1_000_000)
    (part,), _ = copied_arguments((large[:2],), {})
    assert part.untyped_storage().nbytes() == 8


def test_nothing_is_copied_for_an_event_that_nobody_handles() -> None:
    class Uncopied(np.ndarray):
        def copy(self, order: Any = "C") -> Any:
            pytest.fail("it was copied")

    with Task(Context()) as task:
        task.emit("value", np.ones(2).view(Uncopied))
