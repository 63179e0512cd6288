"""The simulators in torch, beside Gymnasium's, world by world."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest
import torch

from dmiddleware.env import VectorEnvManager, make_env_manager
from dmiddleware.zoo.tensor_envs import CartPole, Pendulum, Reacher, Rover

WORLDS = 16


@pytest.mark.parametrize(("kind", "name"), [(CartPole, "CartPole-v1"), (Pendulum, "Pendulum-v1")])
def test_the_equations_are_those_of_gymnasium(kind, name):
    ours, random = kind(WORLDS), np.random.default_rng(0)
    theirs = [gym.make(name).unwrapped for _ in range(WORLDS)]
    obs, _ = ours.reset(seed=0)
    for world, env in enumerate(theirs):
        env.reset(seed=0)
        env.state = ours.state[world].double().numpy()
    n_ends = 0
    for _ in range(150):
        if kind is CartPole:
            actions = random.integers(2, size=WORLDS)
        else:
            actions = random.uniform(-3, 3, (WORLDS, 1)).astype(np.float32)
        obs, reward, terminated, _, info = ours.step(torch.from_numpy(actions))
        final = info["final_obs"]
        for world, env in enumerate(theirs):
            expected, their_reward, their_end, _, _ = env.step(actions[world])
            np.testing.assert_allclose(final[world], expected, rtol=1e-4, atol=1e-4)
            assert reward[world].item() == pytest.approx(their_reward, abs=1e-4)
            assert terminated[world].item() == their_end
            if terminated[world]:
                n_ends += 1
                env.reset(seed=0)
                env.state = ours.state[world].double().numpy()
            else:
                assert torch.equal(obs[world], final[world])
                env.state = ours.state[world].double().numpy()
    assert n_ends > 20 or kind is Pendulum


@pytest.mark.parametrize("kind", [CartPole, Pendulum, Reacher, Rover])
def test_episodes_are_cut_at_the_limit(kind, monkeypatch):
    monkeypatch.setattr(kind, "max_steps", 5)
    env = kind(4)
    env.reset(seed=3)
    actions = torch.zeros((4, *env.single_action_space.shape))
    cuts = [env.step(actions)[3].tolist() for _ in range(10)]
    assert cuts == 2 * ([4 * [False]] * 4 + [4 * [True]])


def numbers(obs):
    return torch.cat(list(obs.values()), dim=1) if isinstance(obs, dict) else obs


@pytest.mark.parametrize("kind", [CartPole, Pendulum, Reacher, Rover])
def test_saved_worlds_continue_exactly(kind):
    env, other = kind(4), kind(4)
    env.reset(seed=3)
    other.reset(seed=1)
    actions = torch.zeros((4, *env.single_action_space.shape))
    for _ in range(7):
        env.step(actions)
    other.load_state_dict(env.state_dict())
    for _ in range(300):
        assert torch.equal(numbers(env.step(actions)[0]), numbers(other.step(actions)[0]))


def test_reaching_the_goals_is_rewarded():
    env = Reacher(2)
    env.reset(seed=0)
    env.state[:, 0] = env.state[:, 2]
    assert env.step(torch.zeros(2, 12))[1] == pytest.approx([1.0, 1.0])
    env.state[0, 0] = env.state[0, 2] + 1.0
    near, far = env.step(torch.zeros(2, 12))[1].flip(0).tolist()
    assert near > 0.99
    assert far == pytest.approx(np.exp(-1.0))


def test_a_class_of_vector_envs_needs_no_mode():
    with make_env_manager("dmiddleware.zoo.tensor_envs:CartPole", env_num=5, seed=0) as envs:
        assert isinstance(envs, VectorEnvManager)
        assert envs.ready_obs.shape == (5, 4)
    with make_env_manager(CartPole, env_num=3, env_kwargs={"device": "cpu"}) as envs:
        assert envs.ready_obs.shape == (3, 4)


def test_a_rover_that_drives_to_the_beacon_is_rewarded_until_its_battery_is_empty():
    env = Rover(64)
    obs, _ = env.reset(seed=0)
    charge, total, n_steps = obs["charge"][:, 0] * 150, torch.zeros(64), torch.zeros(64)
    alive, scale = torch.ones(64, dtype=torch.bool), torch.tensor([4.0, 2.0])
    last = torch.zeros(64)
    for _ in range(150):
        force = scale[0] * obs["beacon"] - scale[1] * obs["proprio"][:, 2:]
        obs, reward, terminated, truncated, info = env.step(force)
        assert env.single_observation_space.contains(
            {name: part[0].numpy() for name, part in info["final_obs"].items()}
        )
        total, n_steps = total + alive * reward, n_steps + alive
        last = reward.where(alive, last)
        alive &= ~(terminated | truncated)
    assert not alive.any()
    assert (last[n_steps > 60] > 0.9).all()
    assert (n_steps <= charge + 1).all()
    assert (n_steps > 0.6 * charge).all()


def test_a_rover_s_scan_tells_where_the_beacon_is():
    env = Rover(512)
    obs, _ = env.reset(seed=0)
    angle = torch.arange(8) * (torch.pi / 4)
    rays = torch.stack((angle.cos(), angle.sin()), 1)
    found = obs["scan"] @ rays
    cosine = torch.nn.functional.cosine_similarity(found, obs["beacon"])
    assert cosine[obs["beacon"].norm(dim=1) > 0.5].mean() > 0.95
