"""Simulators with the interfaces of Isaac Lab and of rsl_rl, made of one of ours."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
from gymnasium import spaces

from dmiddleware import Task
from dmiddleware.data import as_tree
from dmiddleware.env import SimulatorEnv, VectorEnvManager, make_env_manager
from dmiddleware.errors import ConfigError, EnvProtocolError
from dmiddleware.policy import PPOPolicy
from dmiddleware.rollout import RolloutCollector
from dmiddleware.zoo.tensor_envs import CartPole, Pendulum
from middleware import GAEEstimator, OnPolicyLearner, StepCollector

WORLDS = 6


class IsaacLike:
    """Groups of observations, rewards, two flags and extras; buffers that it writes to again."""

    def __init__(self, kind=CartPole, n=WORLDS, *, max_steps=9):
        self.inner = type("Short", (kind,), {"max_steps": max_steps})(n)
        self.num_envs = n
        self.single_action_space = self.inner.single_action_space
        width = self.inner.single_observation_space.shape[0]
        self.single_observation_space = spaces.Dict(
            {
                "policy": spaces.Box(-np.inf, np.inf, (2,)),
                "critic": spaces.Box(-np.inf, np.inf, (width,)),
            }
        )
        self.buffer = torch.zeros(n, width)
        self.closed = False

    def seen(self, obs):
        self.buffer.copy_(obs)
        return {"policy": self.buffer[:, :2], "critic": self.buffer}

    def reset(self, seed=None, options=None):
        obs, _ = self.inner.reset(seed=seed)
        return self.seen(obs), {}

    def step(self, actions):
        obs, reward, terminated, truncated, _ = self.inner.step(actions)
        extras = {"log": {"rate": 0.5}, "success": reward > 2, "count": torch.tensor(3)}
        return self.seen(obs), reward, terminated, truncated, extras

    def close(self):
        self.closed = True


class RslLike(IsaacLike):
    """One flag for both ends, and time-outs in the extras."""

    def reset(self):
        super().reset(seed=0)

    def get_observations(self):
        return {"policy": self.buffer[:, :2], "critic": self.buffer}

    def step(self, actions):
        obs, reward, terminated, truncated, _ = super().step(actions)
        return obs, reward, (terminated | truncated).long(), {"time_outs": truncated}


@pytest.mark.parametrize("kind", [IsaacLike, RslLike])
def test_its_worlds_are_collected_where_they_are(kind):
    simulator = kind()
    with VectorEnvManager(lambda: SimulatorEnv(simulator, groups="critic"), WORLDS) as envs:
        policy = PPOPolicy.for_env(envs, seed=0)
        collector = RolloutCollector(policy, envs)
        batch = collector.collect(40 * WORLDS)
        assert collector.end_rows is not None
    assert batch["obs"].shape == (40, WORLDS, 4)
    assert batch["truncated"].any()
    assert not (batch["terminated"] & batch["truncated"]).any()
    assert set(collector.episode_lengths) <= set(range(1, 10))
    inside = ~batch["done"][:-1]
    assert torch.equal(batch["next_obs"][:-1][inside], batch["obs"][1:][inside])
    # The last observation of an episode is not known: the one before it is taken.
    assert torch.equal(batch["next_obs"][batch["done"]], batch["obs"][batch["done"]])
    assert simulator.closed


def test_its_groups_are_those_of_the_actor_and_the_critic():
    groups = {"actor": ["policy"], "critic": ["policy", "critic"]}
    simulator = IsaacLike(Pendulum)
    ends = []
    with Task(seed=0) as task, VectorEnvManager(lambda: SimulatorEnv(simulator), WORLDS) as envs:
        policy = PPOPolicy.for_env(envs, seed=0, obs_groups=groups, obs_norm=True)
        task.use(StepCollector(policy, envs, n_sample=20 * WORLDS))
        task.use(GAEEstimator(policy))
        task.use(OnPolicyLearner(policy))
        task.use(lambda ctx: ends.append(ctx.trajectory_end_idx))
        task.run(max_step=2)
    assert all(len(rows) == 2 * WORLDS for rows in ends)
    assert set(policy.spaces[0]) == {"policy", "critic"}
    seen = torch.randn(WORLDS, 2)
    action = policy.eval_mode.forward(as_tree({"policy": seen}))["action"]
    assert action.shape == (WORLDS, 1)


def test_groups_are_chosen_and_functions_make_simulators():
    def make(**options):
        return IsaacLike(Pendulum, **options)

    make_vector = functools.partial(SimulatorEnv, make, groups=("policy",), n=4)
    with make_env_manager(make_vector, env_num=4, mode="vector") as envs:
        assert set(envs.ready_obs) == {"policy"}
        assert envs.ready_obs["policy"].shape == (4, 2)
    with make_env_manager(
        functools.partial(SimulatorEnv, make), env_num=WORLDS, mode="vector"
    ) as envs:
        assert set(envs.ready_obs) == {"policy", "critic"}
        step = envs.step(envs.sample_actions())
    assert "success" in step.info
    assert "count" not in step.info


def test_what_a_simulator_does_not_say_is_asked_for():
    class Silent:
        num_envs = 3

    with pytest.raises(ConfigError, match="single_observation_space"):
        SimulatorEnv(Silent())
    with pytest.raises(ConfigError, match="num_envs"):
        SimulatorEnv(object())

    class Odd(IsaacLike):
        def step(self, actions):
            return super().step(actions)[:3]

    env = SimulatorEnv(Odd())
    env.reset()
    with pytest.raises(EnvProtocolError, match="returned 3 values"):
        env.step(torch.zeros(WORLDS))
