"""Updates and acting that are replayed as CUDA graphs; recorded operations stand for the graphs."""

from __future__ import annotations

import contextlib
import copy
import functools
import pickle
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch

from dmiddleware import Task
from dmiddleware.errors import ConfigError, PolicyError
from dmiddleware.policy import (
    A2CPolicy,
    C51Policy,
    Component,
    CrossQPolicy,
    DDPGPolicy,
    DecisionTransformerPolicy,
    DiscreteSACPolicy,
    DQNPolicy,
    IMPALAPolicy,
    IQNPolicy,
    PPGPolicy,
    PPOPolicy,
    PQNPolicy,
    QRDQNPolicy,
    RecurrentPPOPolicy,
    SACPolicy,
    TD3Policy,
    TQCPolicy,
    torch_optimizer,
)
from dmiddleware.policy.captured import WARM_UP, CapturedFunction
from dmiddleware.schedule import Schedule
from middleware import OnlineRLContext
from tests.bus_counter import Bus, chain, on_device, place
from tests.dmiddleware.policy.every_policy import EVERY, batch_for, made, others_are_slow
from tests.recorded_graphs import RecordedGraph, compiled_in_name, recorded_graphs
from tests.variants import mostly_slow

_ONCE = {"epoch_per_collect": 1}
_FALLING = Schedule.linear(1e-2, 1e-3, decay=12, by="update")


def same_state(first: Any, second: Any) -> bool:
    states = [policy.learn_mode.state_dict() for policy in (first, second)]
    parts = [(state["model"], state["target"], state["optimizer"]) for state in states]
    flat = [torch.utils._pytree.tree_flatten(part)[0] for part in parts]
    return len(flat[0]) == len(flat[1]) and all(
        torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
        for a, b in zip(*flat, strict=True)
    )


@contextlib.contextmanager
def graphs() -> Iterator[list[RecordedGraph]]:
    with recorded_graphs() as recorded, mock.patch("torch.compile", compiled_in_name):
        yield recorded


def test_a_call_is_captured_after_others_of_its_form_and_sees_new_inputs() -> None:
    with recorded_graphs() as recorded:
        calls: list[int] = []

        def function(x: torch.Tensor, options: dict[str, Any]) -> dict[str, Any]:
            calls.append(len(x))
            return {"y": x * options["by"], "kind": options["kind"]}

        captured = CapturedFunction(function, "cpu", user="the test")
        for n_rows, kind in ((2, "a"), (3, "a"), (2, "b")):
            outputs = []
            for number in range(WARM_UP + 3):
                x = torch.full((n_rows,), float(number))
                outputs.append(captured(x, {"by": number + 0.5, "kind": kind}))
            for number, output in enumerate(outputs):
                assert output["y"].tolist() == [number * (number + 0.5)] * n_rows
                assert output["kind"] == kind
        assert len(calls) == 3 * (WARM_UP + 1)
        assert [graph.n_replays for graph in recorded] == [3, 3, 3]
        captured.forget()
        captured(torch.zeros(2), {"by": 1.0, "kind": "a"})
        assert len(calls) == 3 * (WARM_UP + 1) + 1


def test_a_function_that_reads_a_value_is_refused() -> None:
    with recorded_graphs():
        captured = CapturedFunction(lambda x: {"y": x * x.sum().item()}, "cpu", user="Mine.update")
        for _ in range(WARM_UP):
            captured(torch.ones(2))
        with pytest.raises(PolicyError, match=r"Mine\.update cannot be captured .* compile=True"):
            captured(torch.ones(2))


@pytest.mark.parametrize(
    "cls",  # the dropout of a decision transformer draws from torch's generator, which both share
    others_are_slow([cls for cls in EVERY if cls is not DecisionTransformerPolicy]),
)
def test_replayed_updates_give_the_same_parameters_as_compiled_ones(cls: Any) -> None:
    names = [name for name in cls.settings_class().__dataclass_fields__ if "learning_rate" in name]
    options = {name: _FALLING for name in names}
    if "value_norm" in cls.settings_class().__dataclass_fields__:
        options["value_norm"] = True
    with graphs() as recorded:
        replayed = made(cls, compile="graphs", **options)
        compiled = made(cls, compile=True, **options)
        for round_number in range(2):
            batch = batch_for(made(cls))
            for policy in (replayed, compiled):
                policy.learn_mode.spec.observe_returns(torch.arange(8.0) * (round_number + 1))
            for _ in range(6):
                for policy in (replayed, compiled):
                    policy.learn_mode.forward(batch)
            assert same_state(replayed, compiled)
        assert sum(graph.n_replays for graph in recorded) > 0
        state = compiled.learn_mode.state_dict()
        for policy in (replayed, compiled):
            policy.learn_mode.load_state_dict(state)
            for _ in range(WARM_UP + 2):
                policy.learn_mode.forward(batch)
        assert same_state(replayed, compiled)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda p: pickle.loads(pickle.dumps(p))])
def test_a_copy_captures_its_updates_itself(copied: Any) -> None:
    with graphs():
        policy = made(DQNPolicy, compile="graphs")
        batch = batch_for(policy)
        for _ in range(WARM_UP + 1):
            policy.learn_mode.forward(batch)
        twin, plain = copied(policy), copied(policy)
        for _ in range(WARM_UP + 2):
            twin.learn_mode.forward(batch)
            policy.learn_mode.forward(batch)
        assert same_state(policy, twin)
        assert not same_state(policy, plain)


@pytest.mark.compiled
@pytest.mark.parametrize("cls", mostly_slow([DQNPolicy, SACPolicy, TD3Policy, PPOPolicy], keep=1))
def test_on_the_cpu_graphs_are_the_compiled_update(cls: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    policies = [made(cls, compile=kind) for kind in ("graphs", True)]
    batch = batch_for(policies[0])
    for _ in range(WARM_UP + 2):
        outputs = [policy.learn_mode.forward(batch) for policy in policies]
        assert outputs[0] == outputs[1]
    assert same_state(*policies)


@pytest.mark.parametrize(
    ("kind", "options"),
    mostly_slow(
        [
            (PPOPolicy, {**_ONCE, "value_norm": True, "obs_norm": True}),
            (DQNPolicy, {}),
            (SACPolicy, {}),
            (TD3Policy, {}),
            (DDPGPolicy, {"noise": "ou"}),
            (PQNPolicy, _ONCE),
            (RecurrentPPOPolicy, _ONCE),
            (IMPALAPolicy, {}),
            (A2CPolicy, {}),
            (PPGPolicy, {}),
            (C51Policy, {"model": {"v_min": 0.0, "v_max": 200.0}}),
            (QRDQNPolicy, {}),
            (IQNPolicy, {}),
            (TQCPolicy, {}),
            (CrossQPolicy, {"model": {"critic_hidden_sizes": [64]}}),
            (DiscreteSACPolicy, {}),
        ],
        keep=2,
    ),
)
def test_a_run_with_replayed_acting_and_updates_is_the_one_without(
    kind: Any, options: dict[str, Any]
) -> None:
    models = []
    for compiles in ("graphs", True):
        bus = Bus()
        with (
            graphs() as recorded,
            on_device(),
            bus.watched(),
            Task(OnlineRLContext(), seed=0) as task,
        ):
            policy, parts = chain(kind, env_num=8, compile=compiles, **options)
            place(policy)
            for part in parts:
                task.use(part)
            task.run(2 if "epoch_per_collect" in options else 6)
            models.append(policy.learn_mode.state_dict()["model"])
        acting = [graph for graph in recorded if graph.generators]
        assert len(acting) == (compiles == "graphs")
        assert (len(recorded) > 1) is (compiles == "graphs")
    for name, value in models[0].items():
        assert torch.equal(models[1][name], value), name


@pytest.mark.parametrize(
    ("kind", "options"),
    mostly_slow(
        [
            (PPOPolicy, {**_ONCE, "value_norm": True}),
            (DQNPolicy, {}),
            (SACPolicy, {}),
            (TD3Policy, {}),
        ],
        keep=1,
    ),
)
def test_a_call_that_is_captured_waits_for_nothing_and_copies_nothing(
    kind: Any, options: dict[str, Any]
) -> None:
    calls: list[tuple[int, int]] = []
    bus = Bus()
    kept: Any = CapturedFunction.__call__

    def watched(self: CapturedFunction, *arguments: Any) -> Any:
        before = bus.waits.total(), bus.copies.total()
        bus.is_strict = True
        output = kept(self, *arguments)
        bus.is_strict = False
        calls.append((bus.waits.total() - before[0], bus.copies.total() - before[1]))
        return output

    with (
        mock.patch("torch.compile", compiled_in_name),
        mock.patch.object(CapturedFunction, "__call__", watched),
        on_device(),
        bus.watched(),
        Task(OnlineRLContext(), seed=0) as task,
    ):
        policy, parts = chain(kind, env_num=8, compile="graphs", **options)
        place(policy)
        for part in parts:
            task.use(part)
        task.run(2 if "epoch_per_collect" in options else 6)
    assert len(calls) > 2 * WARM_UP
    assert set(calls[WARM_UP:]) == {(0, 0)}


def test_an_optimizer_that_reads_back_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"SGD of q.* compile=True"):
        made(DescendingDQN, compile="graphs")
    made(A2CPolicy, compile="graphs", optimizer="adamw")


class DescendingDQN(DQNPolicy):
    """DQN with one of torch's own optimizers."""

    def make_components(self) -> dict[str, Component[Any]]:
        return {"q": Component(self.model, torch_optimizer(torch.optim.SGD, 0.1), acts=True)}


@pytest.mark.parametrize("value", ["graph", "Graphs", 1, None])
def test_other_kinds_of_compiling_are_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match="compile must be True or False or 'graphs'"):
        DQNPolicy({"compile": value, "model": {"obs_shape": 4, "action_shape": 2}})
