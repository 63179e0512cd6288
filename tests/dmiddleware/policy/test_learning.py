"""The algorithms learn, in the smallest loops that show it."""

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces

from dmiddleware.env import make_env_manager
from dmiddleware.policy import BCPolicy, DQNPolicy, PPOPolicy
from dmiddleware.rl import gae
from dmiddleware.rollout import RolloutCollector
from dmiddleware.tree import as_tree, flatten_lead, index_rows, to_numpy, with_columns

pytestmark = pytest.mark.learning

DISCOUNT = 0.9


def test_dqn_finds_the_values_of_a_chain():
    """Two states: action 1 moves on and, in the last state, ends the episode with a reward."""
    policy = DQNPolicy(
        {
            "model": {"obs_shape": 2, "action_shape": 2, "encoder_hidden_sizes": [32]},
            "discount": DISCOUNT,
            "target_update_freq": 20,
            "learning_rate": 0.01,
            "seed": 0,
        }
    )
    first, last = torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])
    batch = as_tree(
        {
            "obs": torch.stack([first, first, last, last]),
            "action": torch.tensor([0, 1, 0, 1]),
            "reward": torch.tensor([0.0, 0.0, 0.0, 1.0]),
            "next_obs": torch.stack([first, last, first, first]),
            "terminated": torch.tensor([False, False, False, True]),
        }
    )
    for _ in range(400):
        policy.learn_mode.forward(batch)
    q = policy.collect_mode.forward(torch.stack([first, last]))["logit"]
    wanted = [[DISCOUNT**2, DISCOUNT], [DISCOUNT**2, 1.0]]
    torch.testing.assert_close(q, torch.tensor(wanted), rtol=0, atol=0.02)


def mean_return(policy, env, n_steps=500, seed=100):
    with make_env_manager(env, env_num=8, seed=seed) as envs:
        totals, finished = np.zeros(8), []
        for _ in range(n_steps):
            obs = torch.from_numpy(envs.ready_obs)
            step = envs.step(to_numpy(policy.eval_mode.forward(obs)["action"]))
            totals += step.reward
            finished += totals[step.done].tolist()
            totals[step.done] = 0
    return np.mean(finished)


def train_ppo(env, cfg, *, n_envs, n_steps, iterations, epochs, size, gae_lambda=0.95):
    with make_env_manager(env, env_num=n_envs, seed=0) as envs:
        policy = PPOPolicy.for_env(envs, **cfg)
        collector = RolloutCollector(policy.collect_mode, envs)
        value_fn = policy.learn_mode.spec.value_fn
        order = torch.Generator().manual_seed(0)
        for _ in range(iterations):
            rows = collector.collect(n_envs * n_steps)
            adv, ret = gae(
                rows["reward"],
                rows["value"],
                value_fn(rows["next_obs"]),
                rows["terminated"],
                rows["done"],
                discount=policy.cfg.discount,
                gae_lambda=gae_lambda,
            )
            flat = flatten_lead(with_columns(rows, adv=adv, ret=ret))
            for _ in range(epochs):
                for chosen in torch.randperm(n_envs * n_steps, generator=order).split(size):
                    policy.learn_mode.forward(index_rows(flat, chosen))
    return policy


def test_ppo_balances_the_pole():
    cfg = {"seed": 0, "learning_rate": 1e-3}
    policy = train_ppo("CartPole-v1", cfg, n_envs=8, n_steps=128, iterations=15, epochs=8, size=256)
    assert mean_return(policy, "CartPole-v1") > 150


class Seek(gym.Env):
    """A point in a plane must be moved to the middle, in as few steps as possible.

    A step costs 0.1, the middle gives 1, and the first point is up to 4 away along each axis.
    """

    observation_space = spaces.Box(-9.0, 9.0, (2,), np.float32)

    def __init__(self, action_space, move):
        self.action_space, self._move = action_space, move

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t, self.at = 0, self.np_random.integers(-4, 5, 2).astype(np.float32)
        return self.at.copy(), {}

    def step(self, action):
        self.at = np.clip(self.at + self._move(action), -9.0, 9.0).astype(np.float32)
        self.t += 1
        is_there = bool(np.abs(self.at).max() <= 0.5)
        return self.at.copy(), float(is_there) - 0.1, is_there, self.t == 20, {}


SEEK = {
    "multi discrete": (spaces.MultiDiscrete([3, 3], start=[-1, -1]), lambda action: action),
    "dict": (
        spaces.Dict({"x": spaces.Discrete(3, start=-1), "y": spaces.Box(-1.0, 1.0, (1, 1))}),
        lambda action: np.array([action["x"], action["y"][0, 0]]),
    ),
    "tuple": (
        spaces.Tuple((spaces.MultiBinary(2), spaces.Discrete(3))),
        lambda action: np.array([action[0][0] - float(action[0][1]), action[1] - 1.0]),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(("action_space", "move"), SEEK.values(), ids=SEEK)
def test_ppo_solves_a_task_whose_actions_have_several_parts(action_space, move):
    cfg = {"seed": 0, "learning_rate": 3e-3, "discount": DISCOUNT}

    def make():
        return Seek(action_space, move)

    policy = train_ppo(make, cfg, n_envs=8, n_steps=64, iterations=20, epochs=6, size=128)
    # The best policy needs at most 4 steps, and 2.9 on average.
    assert mean_return(policy, make) > 0.65


def test_bc_clones_a_rule_that_balances_the_pole():
    with make_env_manager("CartPole-v1", env_num=8, seed=0) as envs:
        policy = BCPolicy.for_env(envs, seed=0)
    obs = torch.randn(4096, 4, generator=torch.Generator().manual_seed(0)) * 0.5
    action = (obs[:, 2] + 0.5 * obs[:, 3] > 0).long()
    for _ in range(20):
        for rows in torch.randperm(4096).split(256):
            policy.learn_mode.forward(as_tree({"obs": obs[rows], "action": action[rows]}))
    assert mean_return(policy, "CartPole-v1") > 150
