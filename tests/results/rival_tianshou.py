"""C51 of Tianshou on LunarLander.

Tianshou publishes no settings of C51 for this task, so it gets those of our own example: its
networks, its schedule of ε, and as many updates.
"""

from __future__ import annotations

import copy
import time
from typing import Any

import gymnasium as gym
import numpy as np
import torch

from dmiddleware.rl import Schedule
from dmiddleware.seeding import derive_seed
from examples.lunarlander import DQN, ENV, EPS, NETWORK, RETURNS

__all__ = ["train_c51"]

ENV_NUM = 8
N_SAMPLE = 64
UPDATES = 32
RANDOM_STEPS = 1000
N_FRESH = 100


def train_c51(env_step: int, n_evaluations: int, n_episode: int, seed: int) -> dict[str, Any]:
    """Train, and return the fields of ``result.json``."""
    from tianshou.algorithm import C51
    from tianshou.algorithm.modelfree.c51 import C51Policy
    from tianshou.algorithm.optim import AdamOptimizerFactory
    from tianshou.data import Collector, VectorReplayBuffer
    from tianshou.env import DummyVectorEnv
    from tianshou.utils.net.common import Net
    from tianshou.utils.torch_utils import policy_within_training_step, torch_train_mode

    torch.set_num_threads(1)  # as Experiment does for small networks
    torch.manual_seed(seed)
    np.random.seed(seed)
    example = gym.make(ENV)
    space = example.action_space
    model = Net(
        state_shape=example.observation_space.shape,
        action_shape=space.n,
        hidden_sizes=NETWORK["encoder_hidden_sizes"],
        num_atoms=51,
        softmax=True,
    )
    policy = C51Policy(model=model, action_space=space, **RETURNS)
    algorithm = C51(
        policy=policy,
        optim=AdamOptimizerFactory(lr=DQN["learning_rate"]),
        gamma=0.99,
        target_update_freq=DQN["target_update_freq"],
    )

    def make_envs(n: int, purpose: str) -> Any:
        envs = DummyVectorEnv([lambda: gym.make(ENV) for _ in range(n)])
        envs.seed(derive_seed(seed, purpose))
        return envs

    def mean_return(collector: Any, n: int) -> float:
        collector.reset()
        with torch_train_mode(policy, False):
            return float(collector.collect(n_episode=n).returns.mean())

    buffer = VectorReplayBuffer(100_000, ENV_NUM)
    collector = Collector(policy, make_envs(ENV_NUM, "collector"), buffer, exploration_noise=True)
    evaluator = Collector(policy, make_envs(25, "evaluator"))
    evaluations: list[tuple[int, float]] = []
    best, best_value, n_updates = copy.deepcopy(policy.state_dict()), -np.inf, 0
    every = env_step // n_evaluations
    eps = Schedule.linear(1.0, EPS["eps_end"], decay=EPS["eps_decay"])
    started_at = time.perf_counter()
    collector.reset()
    n_steps = collector.collect(n_step=RANDOM_STEPS, random=True).n_collected_steps
    while n_steps < env_step:
        policy.set_eps_training(eps(n_steps))
        with policy_within_training_step(policy):
            n_steps += collector.collect(n_step=N_SAMPLE).n_collected_steps
            with torch_train_mode(policy):
                for _ in range(UPDATES):
                    algorithm.update(sample_size=DQN["batch_size"], buffer=buffer)
                    n_updates += 1
        if n_steps >= (len(evaluations) + 1) * every:
            value = mean_return(evaluator, n_episode)
            evaluations.append((n_steps, value))
            if value > best_value:
                best, best_value = copy.deepcopy(policy.state_dict()), value
    train_s = time.perf_counter() - started_at
    judge = Collector(policy, make_envs(25, "fresh episodes"))
    last = mean_return(judge, N_FRESH)
    policy.load_state_dict(best)
    return {
        "mean_return": mean_return(judge, N_FRESH),
        "last_return": last,
        "n_episode": N_FRESH,
        "env_step": n_steps,
        "train_iter": n_updates,
        "train_s": train_s,
        "evaluations": evaluations,
    }
