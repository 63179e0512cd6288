"""Actions and observations outside of the spaces, in data that no collector made."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces

from dmiddleware.data import Batch, as_tree
from dmiddleware.errors import StructureError
from dmiddleware.policy import (
    BCPolicy,
    C51Policy,
    CQLPolicy,
    DDPGPolicy,
    DiscreteSACPolicy,
    DQNPolicy,
    IQLPolicy,
    PPOPolicy,
    SACPolicy,
    TD3BCPolicy,
    TD3Policy,
)

N_ROWS, BAD_ROW = 8, 5
CONTINUOUS = [SACPolicy, TD3Policy, DDPGPolicy, CQLPolicy, IQLPolicy, BCPolicy, PPOPolicy]
DISCRETE = [DQNPolicy, C51Policy, DiscreteSACPolicy, BCPolicy, PPOPolicy]


def made(policy: Any, action_space: gym.Space[Any]) -> Any:
    observation_space = spaces.Box(-1.0, 1.0, (3,))
    env = SimpleNamespace(observation_space=observation_space, action_space=action_space)
    return policy.for_env(env, seed=0)


def rows(action: torch.Tensor, **columns: Any) -> Batch:
    zeros, no = torch.zeros(N_ROWS), torch.zeros(N_ROWS, dtype=torch.bool)
    return as_tree(
        {
            "obs": torch.zeros(N_ROWS, 3), "next_obs": torch.zeros(N_ROWS, 3), "action": action,
            "reward": zeros, "done": no, "terminated": no, "truncated": no,
            "log_prob": zeros, "value": zeros, "adv": zeros, "ret": zeros,
            **columns,
        }
    )  # fmt: skip


@pytest.mark.parametrize("policy", CONTINUOUS)
@pytest.mark.parametrize("value", [3.1, -2.2, float("inf")])
def test_actions_outside_of_a_box_are_refused(policy: Any, value: float) -> None:
    one = made(policy, spaces.Box(-2.0, 3.0, (2,)))
    action = torch.full((N_ROWS, 2), 3.0)
    one.learn_mode.forward(rows(action))
    action[BAD_ROW, 1] = value
    with pytest.raises(StructureError, match=rf"row {BAD_ROW} is .*bounds \[-2.0, -2.0\]"):
        one.learn_mode.forward(rows(action))


@pytest.mark.parametrize("policy", DISCRETE)
@pytest.mark.parametrize(("start", "bad"), [(0, 3), (0, -1), (2, 1), (2, 5)])
def test_choices_outside_of_the_space_are_refused(policy: Any, start: int, bad: int) -> None:
    one = made(policy, spaces.Discrete(3, start=start))
    action = torch.full((N_ROWS,), start + 2)
    one.learn_mode.forward(rows(action))
    action[BAD_ROW] = bad
    with pytest.raises(StructureError, match=rf"row {BAD_ROW} is {bad}, .*{start} to {start + 2}"):
        one.learn_mode.forward(rows(action))


@pytest.mark.parametrize("policy", [DQNPolicy, C51Policy, DiscreteSACPolicy, PPOPolicy])
def test_choices_with_a_dimension_of_their_own_are_refused(policy: Any) -> None:
    with pytest.raises(StructureError, match=r"action has shape \(8, 1\), but must be \(8,\)"):
        made(policy, spaces.Discrete(3)).learn_mode.forward(
            rows(torch.zeros(N_ROWS, 1, dtype=torch.int64))
        )


@pytest.mark.parametrize(
    ("space", "bad"),
    [
        (spaces.MultiDiscrete([2, 3]), [1, 3]),
        (spaces.MultiDiscrete([2, 3], start=[1, 5]), [0, 5]),
        (spaces.MultiBinary(2), [2, 0]),
        (spaces.Box(-1.0, 1.0, (1, 2)), [[0.0, 1.5]]),
        (spaces.Box(0.0, float("inf"), (2,)), [-1.0, 9e9]),
    ],
)
@pytest.mark.parametrize("policy", [BCPolicy, PPOPolicy])
def test_actions_of_every_space_are_checked(policy: Any, space: Any, bad: Any) -> None:
    one = made(policy, space)
    space.seed(0)
    action = torch.stack([torch.as_tensor(space.sample()) for _ in range(N_ROWS)])
    one.learn_mode.forward(rows(action))
    action[BAD_ROW] = torch.tensor(bad, dtype=action.dtype)
    with pytest.raises(StructureError, match=f"row {BAD_ROW} "):
        one.learn_mode.forward(rows(action))


def test_a_part_of_a_nested_action_is_named() -> None:
    space = spaces.Dict({"aim": spaces.Box(-1.0, 1.0, (2,)), "fire": spaces.Discrete(2)})
    action = {"aim": torch.zeros(N_ROWS, 2), "fire": torch.zeros(N_ROWS, dtype=torch.int64)}
    action["fire"][BAD_ROW] = 2
    with pytest.raises(StructureError, match="the part 'fire' of the action in row 5 is 2"):
        made(BCPolicy, space).learn_mode.forward(rows(action))


def test_rounding_at_a_bound_is_no_mistake() -> None:
    one = made(BCPolicy, spaces.Box(-1.0, 1.0, (2,)))
    one.learn_mode.forward(rows(torch.full((N_ROWS, 2), 1.0 + 1e-6)))


@pytest.mark.parametrize("policy", [BCPolicy, IQLPolicy, CQLPolicy, TD3BCPolicy, SACPolicy])
@pytest.mark.parametrize("column", ["obs", "next_obs"])
@pytest.mark.parametrize("shape", [(4,), (2,), (), (3, 1), (1, 3)])
def test_observations_of_another_shape_are_refused(
    policy: Any, column: str, shape: tuple[int, ...]
) -> None:
    agent = made(policy, spaces.Box(-2.0, 3.0, (2,)))
    if column not in agent.learn_columns:
        return
    agent.observe(torch.zeros(N_ROWS, 3))
    agent.learn_mode.forward(rows(torch.zeros(N_ROWS, 2)))
    other = torch.zeros(N_ROWS, *shape)
    message = re.escape(f"{column} has shape {(N_ROWS, *shape)}, but must be {(N_ROWS, 3)}")
    with pytest.raises(StructureError, match=message):
        agent.learn_mode.forward(rows(torch.zeros(N_ROWS, 2), **{column: other}))


@pytest.mark.parametrize("obs_norm", [False, True])
@pytest.mark.parametrize("shape", [(4,), (), (3, 1)])
def test_a_data_set_of_another_env_is_refused_when_the_policy_observes_it(
    obs_norm: bool, shape: tuple[int, ...]
) -> None:
    env = SimpleNamespace(
        observation_space=spaces.Box(-1.0, 1.0, (3,)), action_space=spaces.Box(-1.0, 1.0, (2,))
    )
    agent = TD3BCPolicy.for_env(env, obs_norm=obs_norm, seed=0)
    with pytest.raises(StructureError, match=r"obs has shape .* must be"):
        agent.observe(torch.zeros(N_ROWS, *shape))


def test_a_part_of_nested_observations_is_named() -> None:
    space = spaces.Dict({"arm": spaces.Box(-1.0, 1.0, (3,)), "grip.per": spaces.Discrete(2)})
    env = SimpleNamespace(observation_space=space, action_space=spaces.Discrete(2))
    agent = BCPolicy.for_env(env, seed=0)
    parts = {"arm": np.zeros((4, 3), np.float32), "grip.per": np.zeros(4, np.int64)}
    agent.observe(parts)
    with pytest.raises(StructureError, match=r"obs\.arm has shape \(4, 2\)"):
        agent.observe({**parts, "arm": np.zeros((4, 2), np.float32)})
    with pytest.raises(StructureError, match=r"obs has 'arm', but must have 'arm', 'grip\.per'"):
        agent.observe({"arm": parts["arm"]})
    with pytest.raises(StructureError, match="obs has no parts"):
        agent.observe(np.zeros((4, 3), np.float32))
