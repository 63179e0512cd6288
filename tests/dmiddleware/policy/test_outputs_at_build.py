"""Models whose outputs do not fit the actions are refused when the policy is built."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn

from dmiddleware import Task
from dmiddleware.env import make_env_manager
from dmiddleware.errors import PolicyOutputError, SpaceError
from dmiddleware.model import QNetwork, RecurrentActorCritic, RecurrentQNetwork
from dmiddleware.policy import (
    A2CPolicy,
    BCPolicy,
    C51Policy,
    CQLPolicy,
    DDPGPolicy,
    DiscreteSACPolicy,
    DQNPolicy,
    IMPALAPolicy,
    IPPOPolicy,
    IQLPolicy,
    MAPPOPolicy,
    PPOPolicy,
    QRDQNPolicy,
    R2D2Policy,
    RecurrentPPOPolicy,
    SACPolicy,
    TD3Policy,
    TQCPolicy,
    VDNPolicy,
)
from middleware import StepCollector
from tests.dmiddleware.policy.drawn_envs import Drawn
from tests.dmiddleware.policy.equal_states import same
from tests.dmiddleware.policy.every_policy import EVERY, env_for
from tests.dmiddleware.team_envs import CountingTeam

OBS = spaces.Box(-1.0, 1.0, (3,), np.float32)
BOX = spaces.Box(-2.0, 2.0, (2,), np.float32)
PARTS = spaces.Dict({"move": spaces.Discrete(3), "aim": BOX, "keys": spaces.MultiBinary(2)})


class Outputs(nn.Module):
    """Returns zeros of given sizes by name, for each row, or whatever a function makes of them."""

    def __init__(self, change: Callable[[dict[str, Any]], Any] = dict, **sizes: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))
        self.sizes, self.change = sizes, change

    def forward(self, obs: Any, *_: Any, **__: Any) -> Any:
        lead = (obs if isinstance(obs, torch.Tensor) else obs["agents"]).shape[:-1]
        found = {n: self.weight + torch.ones(*lead, size) for n, size in self.sizes.items()}
        if "value" in found:
            found["value"] = found["value"].squeeze(-1)
        return self.change(found)


class Parts(nn.Module):
    """A model of submodules."""

    def __init__(self, **modules: nn.Module) -> None:
        super().__init__()
        for name, module in modules.items():
            self.add_module(name, module)


class Critic(nn.Module):
    """The values of critics, ``[*lead, *sizes]``, for actions of one length only."""

    def __init__(self, shape: Callable[[int], tuple[int, ...]], n_actions: int = 2) -> None:
        super().__init__()
        self.layer = nn.Linear(3 + n_actions, 1)
        self.shape = shape

    def forward(self, obs: torch.Tensor, action: torch.Tensor | None = None) -> torch.Tensor:
        if action is not None:
            self.layer(torch.cat([obs, action], -1))
        return self.layer.bias + torch.zeros(self.shape(len(obs)))


def build(cls: Any, space: gym.Space[Any], model: nn.Module) -> None:
    env = CountingTeam(n_agent=2) if cls.several_agents else Drawn(OBS, space)
    cls.for_env(env, model=model, seed=0)


CHOICES = spaces.Discrete(2)
ON_POLICY = [PPOPolicy, A2CPolicy, IMPALAPolicy]
KINDS: dict[str, tuple[gym.Space[Any], dict[str, int]]] = {
    "choices": (spaces.Discrete(4), {"logit": 4}),
    "choices from another start": (spaces.Discrete(4, start=-2), {"logit": 4}),
    "several choices": (spaces.MultiDiscrete([2, 5]), {"logit": 7}),
    "bits": (spaces.MultiBinary(3), {"logit": 3}),
    "a grid of bits": (spaces.MultiBinary((2, 2)), {"logit": 4}),
    "numbers": (BOX, {"mu": 2, "sigma": 2}),
    "a grid of numbers": (spaces.Box(-1.0, 1.0, (2, 2), np.float32), {"mu": 4, "sigma": 4}),
    "a dictionary": (PARTS, {"logit": 5, "mu": 2, "sigma": 2}),
    "a tuple": (spaces.Tuple((CHOICES, CHOICES)), {"logit": 4}),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cls", ON_POLICY)
def test_every_output_of_another_length_is_named_with_both_lengths(cls: Any, kind: str) -> None:
    space, sizes = KINDS[kind]
    build(cls, space, Outputs(**sizes, value=1))
    for name, size in sizes.items():
        for wrong in (1, size - 1, size + 1):
            if wrong in (0, size):
                continue
            model = Outputs(**{**sizes, name: wrong}, value=1)
            with pytest.raises(SpaceError, match=rf"output {name} .* {wrong} num.* needs {size}"):
                build(cls, space, model)


@pytest.mark.parametrize("kind", KINDS)
def test_cloning_needs_the_outputs_of_its_actions(kind: str) -> None:
    space, sizes = KINDS[kind]
    for name, size in sizes.items():
        with pytest.raises(SpaceError, match=rf"output {name} .* needs {size}"):
            build(BCPolicy, space, Outputs(**{**sizes, name: size + 1}))


@pytest.mark.parametrize("n_outputs", [1, 3])
@pytest.mark.parametrize("cls", [DQNPolicy, VDNPolicy, *ON_POLICY, IPPOPolicy, MAPPOPolicy])
def test_neither_fewer_nor_more_outputs_than_actions_are_taken(cls: Any, n_outputs: int) -> None:
    n_outputs += int(cls.several_agents and n_outputs == 3)  # its env has three actions
    with pytest.raises(SpaceError, match=f"logit of the model has {n_outputs} numbers"):
        build(cls, CHOICES, Outputs(logit=n_outputs, value=1))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda found: tuple(found.values()), r"returned a tuple of 2.*dictionary with the key"),
        (lambda found: list(found.values()), "returned a list of 2"),
        (lambda found: found["logit"], r"returned a tensor of shape \[[12], 2\]"),
        (lambda found: None, "returned None"),
        (lambda found: {}, "returned an empty dictionary"),
        (lambda found: {"q": found["logit"]}, 'returned the keys "q"'),
        (lambda found: {**found, "logit": found["logit"].tolist()}, "logit of the model has a lis"),
        (lambda found: {**found, "logit": found["logit"].sum()}, "logit of the model has shape"),
    ],
)
@pytest.mark.parametrize("cls", [DQNPolicy, PPOPolicy, A2CPolicy, IMPALAPolicy, BCPolicy])
def test_what_is_not_a_dictionary_of_tensors_is_named(cls: Any, change: Any, message: str) -> None:
    with pytest.raises(PolicyOutputError, match=message):
        build(cls, CHOICES, Outputs(change, logit=2, value=1))


@pytest.mark.parametrize("cls", [*ON_POLICY, IPPOPolicy, MAPPOPolicy])
def test_a_missing_value_is_named(cls: Any) -> None:
    n_actions = 3 if cls.several_agents else 2
    with pytest.raises(PolicyOutputError, match='with the key "value"'):
        build(cls, CHOICES, Outputs(logit=n_actions))
    with pytest.raises(PolicyOutputError, match="value of the model has shape"):
        build(cls, CHOICES, Outputs(lambda f: {**f, "value": f["logit"]}, logit=n_actions))


@pytest.mark.parametrize("cls", ON_POLICY)
def test_actions_that_are_drawn_need_a_deviation(cls: Any) -> None:
    with pytest.raises(PolicyOutputError, match='"mu", "sigma"'):
        build(cls, BOX, Outputs(mu=2, value=1))


def test_outputs_of_another_kind_of_action_are_named() -> None:
    with pytest.raises(PolicyOutputError, match=r'keys "mu", "sigma", "value".*"logit"'):
        build(PPOPolicy, CHOICES, Outputs(mu=2, sigma=2, value=1))
    with pytest.raises(PolicyOutputError, match=r'keys "logit", "value".*"mu"'):
        build(PPOPolicy, BOX, Outputs(logit=2, value=1))


@pytest.mark.parametrize(("cls", "name"), [(C51Policy, "log_prob"), (QRDQNPolicy, "quantiles")])
def test_distributions_of_returns_are_needed_for_every_action(cls: Any, name: str) -> None:
    with pytest.raises(PolicyOutputError, match=f'with the key "{name}"'):
        build(cls, CHOICES, Outputs(logit=2))

    def with_head(shape: tuple[int, ...]) -> nn.Module:
        def change(found: dict[str, Any]) -> Any:
            head = torch.zeros(*found["logit"].shape[:-1], *shape)
            return {**found, name: head}

        return Outputs(change, logit=2)

    for shape in ((51,), (3, 51), (1, 51)):
        with pytest.raises(PolicyOutputError, match=f"output {name} of the model has shape"):
            build(cls, CHOICES, with_head(shape))
    if cls is C51Policy:
        with pytest.raises(PolicyOutputError, match="a buffer support"):
            build(cls, CHOICES, with_head((2, 51)))
    else:
        build(cls, CHOICES, with_head((2, 51)))


GAUSSIAN = {"mu": 2, "sigma": 2}
PAIR: Callable[[int], tuple[int, ...]] = lambda n: (2, n)  # noqa: E731


@pytest.mark.parametrize("cls", [SACPolicy, CQLPolicy, IQLPolicy, TD3Policy, DDPGPolicy])
def test_actors_and_critics_of_values_are_checked(cls: Any) -> None:
    def model(n_actions: int = 2, **change: Any) -> nn.Module:
        parts = {
            "actor": Outputs(mu=2, sigma=2),
            "critic": Critic(PAIR, n_actions),
            "value": Critic(lambda n: (n,)),
        }
        return Parts(**{**parts, **change})

    build(cls, BOX, model())
    with pytest.raises(SpaceError, match="output mu of the model has 1 numbers"):
        build(cls, BOX, model(actor=Outputs(mu=1, sigma=2)))
    with pytest.raises(PolicyOutputError, match="output of the critics"):
        build(cls, BOX, model(critic=Critic(lambda n: (2, n, 3))))
    with pytest.raises(SpaceError):  # the critic takes actions of another length
        build(cls, BOX, model(n_actions=3))
    with pytest.raises(SpaceError, match="supports continuous actions"):
        build(cls, CHOICES, model(actor=Outputs(logit=2)))
    if cls in (SACPolicy, CQLPolicy, IQLPolicy):
        with pytest.raises(PolicyOutputError, match='"mu", "sigma"'):
            build(cls, BOX, model(actor=Outputs(mu=2)))
    if cls is IQLPolicy:
        with pytest.raises(PolicyOutputError, match="output value of the model"):
            build(cls, BOX, model(value=Critic(PAIR)))


def test_critics_of_quantiles_and_of_choices_are_checked() -> None:
    with pytest.raises(PolicyOutputError, match="output of the critics"):
        critic = Critic(lambda n: (2, n, 1, 5))
        build(TQCPolicy, BOX, Parts(actor=Outputs(**GAUSSIAN), critic=critic))
    for n_values in (1, 3):
        critic = Critic(lambda n, n_values=n_values: (2, n, n_values))  # type: ignore[misc]
        with pytest.raises(PolicyOutputError, match=r"of the critics .* \[n_critics, 2, 2\]"):
            build(DiscreteSACPolicy, CHOICES, Parts(actor=Outputs(logit=2), critic=critic))


class OneValue(QNetwork):
    """A subclass of a stock network, whose declared actions are right and whose output is not."""

    def forward(self, *args: Any, **kwargs: Any) -> dict[str, torch.Tensor]:
        return {"logit": super().forward(*args, **kwargs)["logit"][..., :1]}


class OneMemory(RecurrentQNetwork):
    def forward(self, *args: Any, **kwargs: Any) -> dict[str, torch.Tensor]:
        output = super().forward(*args, **kwargs)
        return {**output, "logit": output["logit"][..., :1]}


class NoValue(RecurrentActorCritic):
    def forward(self, *args: Any, **kwargs: Any) -> dict[str, torch.Tensor]:
        output = super().forward(*args, **kwargs)
        return {name: output[name] for name in ("logit", "state")}


def test_a_subclass_of_a_stock_network_is_tried_too() -> None:
    for cls, kind in ((DQNPolicy, OneValue), (R2D2Policy, OneMemory)):
        with pytest.raises(SpaceError, match="1 numbers for an action"):
            build(cls, CHOICES, kind(3, 2))
    with pytest.raises(PolicyOutputError, match='with the key "value"'):
        build(RecurrentPPOPolicy, CHOICES, NoValue(3, 2))


def test_a_policy_that_was_built_without_an_env_is_checked_where_it_meets_one() -> None:
    policy = DQNPolicy({"seed": 0}, model=Outputs(logit=1))
    with (
        make_env_manager(lambda: Drawn(OBS, CHOICES), env_num=2, seed=0) as envs,
        Task() as task,
        pytest.raises(SpaceError, match="1 numbers"),
    ):
        task.use(StepCollector(policy, envs, n_sample=8)).run(max_step=1)


@pytest.mark.parametrize("cls", EVERY)
def test_trying_a_stock_model_changes_nothing(cls: Any) -> None:
    policy = cls.for_env(env_for(cls), seed=0, modes=["collect"])
    env = env_for(cls)
    before = copy.deepcopy(policy.collect_mode.state_dict())
    generator = policy.generator.get_state()
    policy.check_spaces(env.observation_space, env.action_space)
    assert same(policy.collect_mode.state_dict(), before)
    assert torch.equal(policy.generator.get_state(), generator)


WRONG_NUMBERS = [torch.Tensor.long, torch.Tensor.bool, lambda output: output + 1j]


@pytest.mark.parametrize("as_wrong", WRONG_NUMBERS)
@pytest.mark.parametrize("name", ["logit", "value"])
@pytest.mark.parametrize("cls", [DQNPolicy, *ON_POLICY])
def test_outputs_of_other_numbers_are_named_and_not_the_observation(
    cls: Any, name: str, as_wrong: Any
) -> None:
    if cls is DQNPolicy and name == "value":
        return
    model = Outputs(lambda f: {**f, name: as_wrong(f[name])}, logit=2, value=1)
    with pytest.raises(PolicyOutputError, match=f"{name} .* of type torch.*float"):
        build(cls, CHOICES, model)


@pytest.mark.parametrize("output", [np.zeros((1, 2)), [[0.0, 1.0]], 3, {"left": 0.0}])
@pytest.mark.parametrize("cls", [DQNPolicy, PPOPolicy])
def test_an_output_that_is_not_a_tensor_has_another_remedy_than_a_new_shape(
    cls: Any, output: Any
) -> None:
    model = Outputs(lambda f: {**f, "logit": output}, logit=2, value=1)
    with pytest.raises(PolicyOutputError, match=r"logit of the model .*; return a tensor"):
        build(cls, CHOICES, model)
