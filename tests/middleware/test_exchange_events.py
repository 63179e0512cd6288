"""The table of the events by which processes exchange data."""

from __future__ import annotations

import runpy
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import torch

from dmiddleware.data import as_tree
from dmiddleware.env import make_env_manager
from dmiddleware.pipeline import Event, Task, current_node, middleware
from dmiddleware.testing import Cluster
from middleware import (
    Barrier,
    ContextExchanger,
    Curriculum,
    ModelExchanger,
    OnlineRLContext,
    Role,
)
from middleware.exchange import events
from middleware.exchange.events import EVENTS, Counters, ExchangeEvent
from tests.middleware.small_dqn import make_policy

ROOT = Path(__file__).parents[2]
COUNTERS = {"env_step", "env_episode", "train_iter", "epoch", "ranks"}


def test_the_page_has_the_table() -> None:
    writer = runpy.run_path(str(ROOT / "docs" / "write_events.py"))
    assert (ROOT / "docs/reference/events.md").read_text() == writer["page_with_table"](), (
        "run: python docs/write_events.py"
    )


def test_each_declared_event_is_in_the_table_once() -> None:
    declared = [one for one in vars(events).values() if isinstance(one, Event)]
    names = [one.event.name for one in EVENTS]
    assert len({*names}) == len(names)
    assert {one.name for one in declared} <= {*names}
    assert len(declared) >= 8


class Program:
    """Four roles that exchange all they can.

    Args:
        sends_weights: whether the chain has an exchange of weights.
    """

    def __init__(self, *, sends_weights: bool) -> None:
        self.sends_weights = sends_weights

    def __call__(self) -> None:
        with Task(OnlineRLContext()) as task:
            envs = make_env_manager("CartPole-v1", env_num=1, seed=0)
            task.use(Barrier()).use(ContextExchanger())
            if self.sends_weights:
                task.use(ModelExchanger(make_policy(), max_policy_lag=2))
            task.use(Curriculum(lambda ctx, now: {"length": 0.1 * ctx.train_iter}, envs))
            task.use(collect).use(learn).use(evaluate)
            task.run()


@middleware(roles=[Role.COLLECTOR], writes=["trajectories"])
def collect(ctx: OnlineRLContext) -> None:
    """Collect for longer than a wait is silent."""
    nothing = threading.Condition()
    node = current_node()
    assert node is not None
    with nothing:
        node.clock.wait_for(nothing, lambda: False, 10.0)
    ctx.trajectories = as_tree({"done": torch.zeros(1, 1, dtype=torch.bool)})
    ctx.env_step += 1


@middleware(roles=[Role.LEARNER])
def learn(ctx: OnlineRLContext) -> None:
    ctx.train_iter += 1
    if ctx.train_iter == 4:
        ctx.task.stop("enough")


@middleware(roles=[Role.EVALUATOR], writes=["eval_value"])
def evaluate(ctx: OnlineRLContext) -> None:
    ctx.eval_value = ctx.last_eval_value = 1.0
    ctx.last_eval_iter = ctx.train_iter


def row_of(name: str) -> ExchangeEvent:
    """Return the row of an event; a placeholder stands for the last part of its name."""
    rows = {one.event.name: one for one in EVENTS}
    family = next((one for one in rows if "<" in one and name.startswith(one.split("<")[0])), "")
    return rows[name] if name in rows else rows[family]


def check(kind: Any, value: Any) -> None:
    """Check that a value is what the table says."""
    if kind is Counters:
        assert value.keys() == COUNTERS
        assert all(type(one) is int for one in value.values())
    elif (fields := get_type_hints(kind)) and isinstance(value, Mapping):
        assert value.keys() == fields.keys()
    else:
        assert type(value) is kind


def test_what_is_sent_is_what_the_table_says(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[tuple[Event, tuple[Any, ...]]] = []
    emit = Task.emit

    def record(self: Task[Any], event: Any, *args: Any, **kwargs: Any) -> None:
        if isinstance(event, Event) and event.name.startswith("exchange."):
            sent.append((event, args))
        emit(self, event, *args, **kwargs)

    monkeypatch.setattr(Task, "emit", record)
    roles = {"learner": 1, "collector": 1, "evaluator": 1}
    for sends_weights in (True, False):
        with Cluster(Program(sends_weights=sends_weights), roles=roles) as cluster:
            cluster.run(timeout_s=600.0)
    for event, args in sent:
        row = row_of(event.name)
        same = {"name": row.event.name}
        assert {**_contract(event), **same} == {**_contract(row.event), **same}
        assert len(args) == len(row.payload)
        for kind, value in zip(row.payload.values(), args, strict=True):
            check(kind, value)
    only_with_ranks = {"exchange.collected.<rank>"}
    found = {row_of(event.name).event.name for event, _ in sent}
    assert found == {one.event.name for one in EVENTS} - only_with_ranks


def _contract(event: Event) -> dict[str, Any]:
    return {name: getattr(event, name) for name in Event.__slots__}
