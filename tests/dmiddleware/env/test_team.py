"""Envs with several agents: their spaces, and what the managers return."""

from __future__ import annotations

import functools

import gymnasium as gym
import numpy as np
import pytest

from dmiddleware.env import (
    AgentSpaces,
    SyncEnvManager,
    agent_spaces,
    make_env_manager,
    n_agent_of,
    team_spaces,
)
from dmiddleware.errors import EnvProtocolError, SpaceError
from tests.dmiddleware.team_envs import CountingTeam

BOX = gym.spaces.Box(np.array([-1, 0], np.float32), np.array([1, 2], np.float32))


@pytest.mark.parametrize(
    "observation",
    [
        BOX,
        gym.spaces.Box(0, 255, (2, 4, 4), np.uint8),
        gym.spaces.Discrete(4),
        gym.spaces.Dict({"near": BOX, "far": gym.spaces.Discrete(2)}),
        gym.spaces.Tuple((BOX, BOX)),
    ],
    ids=lambda space: type(space).__name__,
)
@pytest.mark.parametrize("action", [gym.spaces.Discrete(3, start=1), BOX], ids=["choice", "box"])
def test_the_spaces_of_one_agent_are_found_in_those_of_the_team(observation, action):
    one = AgentSpaces(3, observation, action, BOX)
    spaces = team_spaces(one)
    assert n_agent_of(spaces[0]) == 3
    assert agent_spaces(*spaces) == one


@pytest.mark.parametrize(
    ("action", "masks"),
    [
        (gym.spaces.MultiDiscrete([2, 3]), False),
        (gym.spaces.Box(0, 9, (2,), int), False),
        (BOX, True),
    ],
)
def test_other_actions_are_refused(action, masks):
    with pytest.raises(SpaceError, match="agents take Discrete actions"):
        team_spaces(AgentSpaces(2, BOX, action, None), has_action_masks=masks)


def test_a_single_agent_has_no_agent_spaces():
    observation = gym.spaces.Dict({"agents": BOX})
    assert n_agent_of(observation) is None
    assert n_agent_of(BOX) is None
    with pytest.raises(SpaceError, match="several agents"):
        agent_spaces(observation, gym.spaces.Discrete(2))


def test_a_space_that_cannot_be_divided_is_refused():
    odd = gym.spaces.Dict({"agents": gym.spaces.Text(3), "agent_mask": gym.spaces.MultiBinary(2)})
    with pytest.raises(SpaceError, match="give each agent"):
        agent_spaces(odd, gym.spaces.MultiDiscrete([2, 2]))


@pytest.mark.parametrize("mode", ["sync", pytest.param("async", marks=pytest.mark.process)])
def test_rewards_have_a_number_for_each_agent(mode):
    with make_env_manager(CountingTeam, env_num=2, mode=mode) as envs:
        assert n_agent_of(envs.observation_space) == 3
        assert envs.ready_obs["agents"].shape == (2, 3, 2)
        for t in range(1, 6):
            step = envs.step(np.ones((2, 3), np.int64))
            assert step.reward.dtype == np.float32
            assert step.reward.tolist() == [[t, 2.0 * t, 3.0 * t]] * 2
            assert step.info.row(0)["sum"] == 3
        assert step.truncated.all()
        last = step.info.row(1)
        assert last["eval_episode_return"] == 30
        assert [last[f"eval_episode_return_{agent}"] for agent in range(3)] == [15, 30, 45]
        assert next(iter(step)).reward == [5.0, 10.0, 15.0]
        assert step.ready_obs["state"].tolist() == [[0.0], [0.0]]
        assert step.next_obs["state"].tolist() == [[5.0], [5.0]]


@pytest.mark.parametrize("mode", ["sync", pytest.param("async", marks=pytest.mark.process)])
def test_an_env_that_fails_has_the_reward_0_for_each_agent(mode):
    crashing = functools.partial(CountingTeam, crashes=(0, 2))
    manager = make_env_manager(crashing, env_num=2, mode=mode)
    with manager as envs:
        for _ in range(3):
            step = envs.step({0: np.zeros(3, np.int64), 1: np.zeros(3, np.int64)})
        assert step.abnormal.all()
        assert step.reward.tolist() == [[0.0] * 3] * 2


def test_a_manager_continues_with_the_returns_of_each_agent():
    with make_env_manager(CountingTeam, env_num=1) as envs:
        for _ in range(2):
            envs.step(np.zeros((1, 3), np.int64))
        with make_env_manager(CountingTeam, env_num=1) as others:
            assert others.load_state_dict(envs.state_dict())
            for _ in range(3):
                step = others.step(np.zeros((1, 3), np.int64))
            assert step.info.row(0)["eval_episode_return_2"] == 45


@pytest.mark.parametrize("reward", [1.0, [1.0, 2.0]])
def test_a_reward_of_another_shape_is_refused(reward):
    class Wrong(CountingTeam):
        def step(self, action):
            obs, _, *rest = super().step(action)
            return obs, reward, *rest

    with (
        SyncEnvManager([Wrong] * 3) as envs,
        pytest.raises(EnvProtocolError, match="3 numbers, one per agent"),
    ):
        envs.step(np.zeros((3, 3), np.int64))


def test_a_single_agent_returns_one_number():
    class Wrong(gym.Env):
        observation_space, action_space = BOX, gym.spaces.Discrete(2)

        def reset(self, *, seed=None, options=None):
            return np.zeros(2, np.float32), {}

        def step(self, action):
            return np.zeros(2, np.float32), np.ones(2), False, False, {}

    manager = SyncEnvManager([Wrong])
    assert n_agent_of(manager.observation_space) is None
    with manager as envs, pytest.raises(EnvProtocolError, match="must be one number"):
        envs.step(np.zeros(1, np.int64))
