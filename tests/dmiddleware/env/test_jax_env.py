"""Envs of JAX: of ours, with the interface of Brax, and those of Brax and MuJoCo Playground."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch
from gymnasium import spaces

from dmiddleware.env import JaxEnv, VectorEnvManager, make_env_manager
from dmiddleware.errors import CheckpointMismatch, ConfigError, EnvProtocolError
from dmiddleware.policy import PPOPolicy
from dmiddleware.rollout import RolloutCollector
from tests.dmiddleware.env.optional import needed

jax = needed("jax")
from tests.dmiddleware.env.jax_line import Line, in_groups  # noqa: E402 - after the skip

WORLDS = 20


@pytest.fixture(scope="module")
def line():
    """Compiled once for many tests; where an episode begins and ends, a reset decides."""
    return JaxEnv(Line(), WORLDS, episode_length=25, infos=("far",))


@pytest.fixture(scope="module")
def rollout(line):
    with VectorEnvManager(lambda: line, WORLDS, seed=0) as envs:
        collector = RolloutCollector(PPOPolicy.for_env(envs, seed=0), envs)
        return collector.collect(60 * WORLDS), collector


def test_its_worlds_are_collected_where_they_are(rollout):
    batch, collector = rollout
    assert collector.end_rows is not None  # collected on the device
    assert batch["obs"].shape == (60, WORLDS, 2)
    terminated, truncated = batch["terminated"], batch["truncated"]
    assert terminated.any()
    assert truncated.any()
    place, n_steps = batch["next_obs"].unbind(-1)
    assert torch.equal(terminated, place > 2)
    assert torch.equal(truncated, (n_steps == 25) & (place <= 2))
    assert torch.equal(batch["reward"], place)
    # The last observation of an episode is there, and the next one begins near 0.
    done = batch["done"]
    assert torch.equal(n_steps, batch["obs"][..., 1] + 1)
    assert torch.equal(batch["next_obs"][:-1][~done[:-1]], batch["obs"][1:][~done[:-1]])
    first = batch["obs"][1:][done[:-1]]
    assert (first[:, 0].abs() <= 0.5).all()
    assert (first[:, 1] == 0).all()
    assert max(collector.episode_lengths) == 25


def test_episodes_begin_in_states_that_are_drawn_for_them(rollout):
    batch, _ = rollout
    first = batch["obs"][..., 0][batch["obs"][..., 1] == 0]
    assert len(first) > 2 * WORLDS
    assert len(first.unique()) == len(first)


def test_a_seed_repeats_what_happens(line):
    def places(seed):
        with VectorEnvManager(lambda: line, WORLDS, seed=seed) as envs:
            steps = [envs.step_on_device(torch.ones(WORLDS, 1)) for _ in range(20)]
        return torch.stack([step.ready_obs for step in steps])

    assert torch.equal(places(3), places(3))
    assert not torch.equal(places(3), places(4))


def test_nothing_is_copied_between_jax_and_torch(line, monkeypatch):
    to_torch, to_jax = torch.utils.dlpack.from_dlpack, jax.dlpack.from_dlpack
    places = []

    def torch_sees(array):
        tensor = to_torch(array)
        places.append((array.unsafe_buffer_pointer(), tensor.data_ptr()))
        return tensor

    def jax_sees(tensor):
        array = to_jax(tensor)
        places.append((tensor.data_ptr(), array.unsafe_buffer_pointer()))
        return array

    line.reset(seed=0)
    line.step(torch.zeros(WORLDS, 1))
    monkeypatch.setattr(torch.utils.dlpack, "from_dlpack", torch_sees)
    monkeypatch.setattr(jax.dlpack, "from_dlpack", jax_sees)
    with jax.transfer_guard("disallow_explicit"):
        for _ in range(4):
            _, reward, terminated, _, info = line.step(torch.zeros(WORLDS, 1))
    assert len(places) == 4 * 8
    assert all(before == after for before, after in places)
    assert (reward.dtype, terminated.dtype) == (torch.float32, torch.bool)
    assert torch.equal(info["far"], info["final_obs"][:, 0])


def test_a_run_continues_where_it_was_saved(line):
    actions = torch.linspace(-1, 1, WORLDS)[:, None]

    def steps(envs):
        return torch.stack([envs.step_on_device(actions).next_obs for _ in range(30)])

    with VectorEnvManager(lambda: line, WORLDS, seed=0) as envs:
        steps(envs)
        state, before = envs.state_dict(), envs.ready_obs
        following = steps(envs)
    with VectorEnvManager(lambda: line, WORLDS, seed=1) as envs:
        assert envs.load_state_dict(state)
        assert torch.equal(envs.ready_obs, before)
        assert torch.equal(steps(envs), following)
    with pytest.raises(CheckpointMismatch, match=f"{WORLDS} worlds"):
        line.load_state_dict({"x": np.zeros(3)})


def test_groups_of_observations_are_chosen():
    both = JaxEnv(in_groups, episode_length=None)
    assert set(both.single_observation_space.spaces) == {"state", "privileged_state"}
    name = "tests.dmiddleware.env.jax_line:Line(in_groups=True)"
    options = {"env": name, "episode_length": 5, "groups": "privileged_state"}
    with make_env_manager("dmiddleware.env:JaxEnv", env_num=2, env_kwargs=options) as envs:
        assert envs.observation_space == spaces.Box(-np.inf, np.inf, (2,))
        assert envs.ready_obs.shape == (2, 2)


class Picky(Line):
    """Takes one of three actions, and shows a picture of them."""

    action_size = None

    def seen(self, place, n_steps):
        return (place + jax.numpy.arange(3)).astype(jax.numpy.uint8)

    def step(self, state, action):
        assert action.dtype == jax.numpy.int32
        return super().step(state, action[None] - 1.0)


def test_spaces_are_those_of_the_functions():
    with pytest.raises(ConfigError, match="no action_size"):
        JaxEnv(Picky(), episode_length=5)
    env = JaxEnv(Picky(), 3, episode_length=5, action_space=spaces.Discrete(3))
    assert env.single_observation_space == spaces.Box(0, 255, (3,), np.uint8)
    env.reset(seed=2**40)
    obs, *_ = env.step(torch.tensor([0, 1, 2]))
    assert obs.dtype == torch.uint8


class Resets(Line):
    def reset(self, rng):
        state = super().reset(rng)
        state.info["first_obs"] = state.obs
        return state


class Grows(Line):
    def step(self, state, action):
        state = super().step(state, action)
        state.info["more"] = state.reward
        return state


def test_what_would_go_wrong_later_is_refused(monkeypatch):
    with pytest.raises(ConfigError, match="resets its worlds itself"):
        JaxEnv(Resets, episode_length=5)
    with pytest.raises(ConfigError, match="no reset"):
        JaxEnv(object(), episode_length=5)
    with pytest.raises(ConfigError, match="positive"):
        JaxEnv(Line, episode_length=0)
    with pytest.raises(ConfigError, match=r"'near'.*far"):
        JaxEnv(Line, episode_length=5, infos=("near",))
    with pytest.raises(ConfigError, match="'cuda:7'"):
        JaxEnv(Line, episode_length=5, device="cuda:7")
    with pytest.raises(ConfigError, match="'moon'"):
        JaxEnv(Line, episode_length=5, device="moon")
    grows = JaxEnv(Grows, 2, episode_length=5)
    grows.reset()
    with pytest.raises(EnvProtocolError, match="more"):
        grows.step(torch.zeros(2, 1))
    monkeypatch.setitem(sys.modules, "jax", None)
    with pytest.raises(ConfigError, match=r"dmiddleware\[jax\]"):
        JaxEnv(Line, episode_length=5)
