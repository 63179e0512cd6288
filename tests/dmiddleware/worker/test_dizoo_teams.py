"""Envs of dizoo with several agents."""

import gymnasium as gym
import numpy as np
import pytest

from dmiddleware.env import agent_spaces
from dmiddleware.errors import ConfigError
from dmiddleware.worker.dizoo_envs import training_env

SPREAD = {"env_id": "simple_spread_v2", "n_agent": 3, "n_landmark": 3}


def wave(step, n_agent):
    """Actions in [-1, 1] of agents, different in each step."""
    return np.sin(np.arange(step, step + 5 * n_agent)).reshape(n_agent, 5).astype(np.float32)


def cycle(step, n_agent):
    """Discrete actions of agents, different in each step."""
    return (step // 3 + np.arange(n_agent)) % 5


@pytest.mark.parametrize(
    ("options", "actions", "episode_return", "agent", "state_sum"),
    [
        (
            {"n_agent": 5, "n_landmark": 5},
            cycle,
            -435.16189384,
            [0.25248, -0.2959, 0.54715, -0.11736],
            19.31384659,
        ),
        (
            {"continuous_actions": True, "act_scale": True},
            wave,
            -259.68930435,
            [0.04408, -0.26628, 0.60179, 0.24315],
            8.40295410,
        ),
        (
            {"agent_specific_global_state": True},
            cycle,
            -205.25379419,
            [0.21433, -0.35131, 0.53825, -0.13028],
            54.07539368,
        ),
    ],
)
def test_simple_spread_goes_as_that_of_dizoo(options, actions, episode_return, agent, state_sum):
    """The numbers are from dizoo's env, in PettingZoo 1.22.3, with the same seed and actions."""
    options = {**SPREAD, **options}
    env = training_env("petting_zoo", options)
    obs, _ = env.reset(seed=3)
    total, is_over, step = 0.0, False, 0
    while not is_over:
        assert obs in env.observation_space
        obs, rewards, terminated, is_over, _ = env.step(actions(step, options["n_agent"]))
        assert (rewards == rewards[0]).all() and not terminated
        total, step = total + rewards[0], step + 1
    assert step == 25
    assert total == pytest.approx(episode_return, abs=1e-4)
    assert obs["agents"][1, :4] == pytest.approx(agent, abs=2e-5)
    assert np.abs(obs["state"]).sum() == pytest.approx(state_sum, abs=1e-3)


def test_simple_spread_has_the_spaces_of_dizoo():
    for options, state in (
        ({}, (30,)),
        ({"agent_specific_global_state": True}, (3 * (18 + 30),)),
        ({"agent_obs_only": True}, None),
    ):
        env = training_env("petting_zoo", {**SPREAD, **options})
        each = agent_spaces(env.observation_space, env.action_space)
        assert (each.n_agent, each.observation.shape) == (3, (18,))
        assert each.action == gym.spaces.Discrete(5)
        assert (each.state and each.state.shape) == state
    assert training_env("petting_zoo", {**SPREAD, "continuous_actions": True}).action_space == (
        gym.spaces.Box(0.0, 1.0, (3, 5), np.float32)
    )


def robot(scenario, division, **options):
    options = {"scenario": scenario, "agent_conf": division, "agent_obsk": 2, **options}
    return training_env("mujoco_multi", options)


@pytest.mark.parametrize(
    ("scenario", "division", "agent", "state", "action"),
    [
        ("Ant-v2", "2x4d", 54, 111, (2, 4)),
        ("Ant-v2", "4x2", 34, 111, (4, 2)),
        ("HalfCheetah-v2", "2x3", 8, 17, (2, 3)),
        ("HalfCheetah-v2", "6x1", 6, 17, (6, 1)),
        ("Hopper-v2", "3x1", 4, 11, (3, 1)),
        ("Walker2d-v2", "2x3", 8, 17, (2, 3)),
    ],
)
def test_a_robot_has_the_spaces_of_dizoo(scenario, division, agent, state, action):
    env = robot(scenario, division)
    obs, _ = env.reset(seed=0)
    assert obs in env.observation_space
    assert env.step(env.action_space.sample())[0] in env.observation_space
    assert obs["agents"].shape == (action[0], agent)
    assert obs["state"].shape == (action[0] * state,)
    assert env.action_space == gym.spaces.Box(-1, 1, action, np.float32)
    env.close()


def test_agents_see_their_joints_and_move_the_robot_as_its_action():
    team, alone = (
        robot("HalfCheetah-v2", "2x3"),
        training_env("mujoco", {"env_id": "HalfCheetah-v3"}),
    )
    obs, _ = team.reset(seed=0)
    whole, _ = alone.reset(seed=0)
    action = np.linspace(-1, 1, 6, dtype=np.float32)
    for _ in range(3):
        obs, rewards, *_ = team.step(action.reshape(2, 3))
        whole, reward, *_ = alone.step(action)
    assert rewards == pytest.approx([reward, reward])
    assert obs["state"] == pytest.approx(np.tile(whole, 2))
    # Positions of the robot come first, then velocities: back thigh, shin, foot, and front ones.
    thigh, shin, foot, other_thigh, other_shin, _ = zip(whole[2:8], whole[11:17], strict=True)
    near = [other_thigh[0], other_shin[0]]
    assert obs["agents"][0] == pytest.approx([*foot, *shin, *thigh, *near])


def test_diagonal_legs_of_the_ant_are_those_of_dizoo():
    env = robot("Ant-v2", "2x4d", agent_obsk=0, k_categories="qpos")
    obs, _ = env.reset(seed=0)
    ankle1, ankle2, ankle3, ankle4 = env.unwrapped.data.qpos[[-7, -5, -3, -1]]
    assert obs["agents"][0, :2] == pytest.approx([ankle1, ankle3])
    assert obs["agents"][1, :2] == pytest.approx([ankle2, ankle4])


def test_agents_without_a_distance_see_all_and_their_states_may_name_them():
    env = robot("HalfCheetah-v2", "2x3", agent_obsk=None, add_agent_id=True, episode_limit=2)
    obs, _ = env.reset(seed=0)
    assert obs["agents"].shape == (2, 17) and obs["state"].shape == (2 * 19,)
    assert obs["state"].reshape(2, 19)[:, 17:] == pytest.approx(np.eye(2))
    ends = [env.step(env.action_space.sample())[2:4] for _ in range(2)]
    assert ends == [(False, False), (False, True)]


@pytest.mark.parametrize(
    ("kind", "options", "word"),
    [
        ("petting_zoo", {**SPREAD, "env_id": "simple_tag_v2"}, "simple_spread_v2"),
        ("petting_zoo", {**SPREAD, "n_landmark": 4}, "n_landmark"),
        ("petting_zoo", {**SPREAD, "n_agent": 1, "n_landmark": 1}, "at least 2"),
        ("mujoco_multi", {"scenario": "manyagent_ant", "agent_conf": "2x3"}, "HalfCheetah-v2"),
        ("mujoco_multi", {"scenario": "Ant-v2", "agent_conf": "8x1"}, "2x4d"),
        (
            "mujoco_multi",
            {"scenario": "Ant-v2", "agent_conf": "2x4", "global_categories": "qpos"},
            "global_categories",
        ),
    ],
)
def test_a_team_that_is_not_here_is_refused(kind, options, word):
    with pytest.raises(ConfigError, match=word):
        training_env(kind, options)
