"""Compiled acting in all envs of a device at once."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from dmiddleware import Task
from dmiddleware.env import VectorEnvManager
from dmiddleware.errors import PolicyError
from dmiddleware.policy import (
    A2CPolicy,
    C51Policy,
    DQNPolicy,
    IMPALAPolicy,
    IQNPolicy,
    PPGPolicy,
    PPOPolicy,
    PQNPolicy,
    QRDQNPolicy,
)
from dmiddleware.policy.compiled import CompiledFunction
from dmiddleware.tree import leaves
from dmiddleware.zoo.tensor_envs import CartPole, Rover, TensorEnv
from middleware import EpsGreedyHandler, OnlineRLContext, StepCollector
from tests.bus_counter import env_of
from tests.variants import mostly_slow

N_ENVS = 8


def collected(
    kind: Any, env: Callable[[int], TensorEnv] | None = None, n_calls: int = 3, **options: Any
) -> list[dict[str, torch.Tensor]]:
    """Return what a policy that does not learn collects in envs that return tensors."""
    make_envs = env or env_of(kind)
    envs = VectorEnvManager(lambda: make_envs(N_ENVS), N_ENVS, seed=0)
    policy = kind.for_env(envs, seed=0, **options)
    batches = []
    with Task(OnlineRLContext(), seed=0) as task:
        if not policy.explores:
            task.use(EpsGreedyHandler(policy))
        task.use(StepCollector(policy, envs, n_sample=5 * N_ENVS))
        for _ in range(n_calls):
            task.run(1)
            columns = dict(leaves(task.ctx.trajectories))
            batches.append({name: columns[name] for name in columns if name != "episode_id"})
    return batches


@pytest.mark.compiled
@pytest.mark.parametrize(
    ("kind", "options"),
    mostly_slow(
        [
            (PPOPolicy, {"obs_norm": True}),
            (PPOPolicy, {"env": Rover, "autocast": "bfloat16"}),
            (DQNPolicy, {}),
            (PQNPolicy, {}),
            (IMPALAPolicy, {}),
            (A2CPolicy, {}),
            (PPGPolicy, {}),
            (C51Policy, {"model": {"v_min": 0.0, "v_max": 200.0, "noisy": True}}),
            (QRDQNPolicy, {}),
            (IQNPolicy, {}),
        ],
        keep=3,
    ),
)
def test_compiled_acting_does_the_same(
    kind: Any, options: dict[str, Any], monkeypatch: Any
) -> None:
    calls: list[bool] = []
    run = CompiledFunction.__call__

    def watched(self: CompiledFunction, *args: Any, **kwargs: Any) -> Any:
        calls.append(True)
        return run(self, *args, **kwargs)

    monkeypatch.setattr(CompiledFunction, "__call__", watched)
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    plain = collected(kind, **options)
    assert not calls
    compiled = collected(kind, compile=True, **options)
    assert len(calls) == 15
    for expected, batch in zip(plain, compiled, strict=True):
        assert batch.keys() == expected.keys()
        for name, column in batch.items():
            assert torch.equal(column, expected[name]), name


class Branching(torch.nn.Module):
    """A network with a branch that the compiler cannot take."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 3)

    def forward(self, obs: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return logits ``[E, 2]`` and values ``[E]``."""
        output = self.layer(obs.clamp(-1, 1) if obs.max() > 1 else obs)
        return {"logit": output[:, :2], "value": output[:, 2]}


@pytest.mark.compiled
def test_a_network_that_cannot_be_compiled_is_an_error_with_a_remedy() -> None:
    with pytest.raises(PolicyError, match="compile Branching; set compile=False"):
        collected(PPOPolicy, model=Branching(), compile=True)


@pytest.mark.compiled
def test_the_collecting_network_is_compiled_once_for_its_envs(monkeypatch: Any) -> None:
    rows: list[int] = []

    def backend(graph: Any, inputs: list[Any]) -> Any:
        shapes = [tuple(getattr(item, "shape", ())) for item in inputs]
        rows.extend(shape[0] for shape in shapes if shape[1:] == (4,))
        return graph.forward

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    envs = VectorEnvManager(lambda: CartPole(N_ENVS), N_ENVS, seed=0)
    policy = PPOPolicy.for_env(envs, seed=0, compile=True)
    for _ in range(2):
        StepCollector(policy, envs, n_sample=N_ENVS)(OnlineRLContext())
        policy.check_spaces(envs.observation_space, envs.action_space)
    assert [n_rows for n_rows in rows if n_rows <= N_ENVS] == [N_ENVS]
