"""C51 of Tianshou on LunarLander.

Tianshou publishes no settings of C51 for this task, so it gets those that the zoo publishes for
DQN, as the paper of C51 has those of DQN.
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
from tests.results.cases import N_FRESH, Case

__all__ = ["train_c51"]


def train_c51(case: Case, seed: int) -> dict[str, Any]:
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
    given = case.options
    example = gym.make(case.env)
    space = example.action_space
    model = Net(
        state_shape=example.observation_space.shape,
        action_shape=space.n,
        hidden_sizes=case.policy_kwargs["net_arch"],
        num_atoms=51,
        softmax=True,
    )
    policy = C51Policy(model=model, action_space=space, v_min=given["v_min"], v_max=given["v_max"])
    algorithm = C51(
        policy=policy,
        optim=AdamOptimizerFactory(lr=given["learning_rate"]),
        gamma=given["gamma"],
        target_update_freq=given["target_update_interval"],
    )

    def make_envs(n: int, purpose: str) -> Any:
        envs = DummyVectorEnv([lambda: gym.make(case.env) for _ in range(n)])
        envs.seed(derive_seed(seed, purpose))
        return envs

    def mean_return(collector: Any, n: int) -> float:
        # One episode of each env at a time: the first n of more episodes would be the shortest.
        returns: list[float] = []
        with torch_train_mode(policy, False):
            while len(returns) < n:
                collector.reset()
                returns += collector.collect(n_episode=collector.env_num).returns.tolist()
        return float(np.mean(returns))

    buffer = VectorReplayBuffer(given["buffer_size"], 1)
    collector = Collector(policy, make_envs(1, "collector"), buffer, exploration_noise=True)
    evaluator = Collector(policy, make_envs(case.eval_env_num, "evaluator"))
    evaluations: list[tuple[int, float]] = []
    best, best_value, n_updates = copy.deepcopy(policy.state_dict()), -np.inf, 0
    every = case.env_step // case.n_evaluations
    fall = given["exploration_fraction"] * case.env_step
    eps = Schedule.linear(1.0, given["exploration_final_eps"], decay=fall)
    started_at = time.perf_counter()
    collector.reset()
    n_steps = 0
    while n_steps < case.env_step:
        policy.set_eps_training(eps(n_steps))
        with policy_within_training_step(policy):
            n_steps += collector.collect(n_step=given["train_freq"]).n_collected_steps
            with torch_train_mode(policy):
                for _ in range(given["train_freq"]):
                    algorithm.update(sample_size=given["batch_size"], buffer=buffer)
                    n_updates += 1
        if n_steps >= (len(evaluations) + 1) * every:
            value = mean_return(evaluator, case.n_episode)
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
