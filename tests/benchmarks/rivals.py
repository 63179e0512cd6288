"""The same training in other libraries, each with the settings that suit its speed best."""

from __future__ import annotations

import math
from typing import Protocol

import numpy as np
import torch

from tests.benchmarks import setting as S


class Rival(Protocol):
    """A training run to compare with."""

    @property
    def updates(self) -> int:
        """Updates made so far."""
        ...

    def run(self, steps: int) -> None:
        """Step all environments ``steps`` times, with the updates after each."""


class StableBaselines3DQN:
    """stable-baselines3's DQN; ``run`` continues where the last call stopped.

    It logs nothing and has an empty callback. It always clips gradients; an infinite limit leaves
    them unchanged.
    """

    def __init__(self, seed: int = 0, *, fused: bool) -> None:
        from stable_baselines3 import DQN
        from stable_baselines3.common.vec_env import DummyVecEnv

        self.model = DQN(
            "MlpPolicy",
            DummyVecEnv([S.make_env for _ in range(S.ENV_NUM)]),
            learning_rate=S.LEARNING_RATE,
            buffer_size=S.BUFFER_SIZE,
            learning_starts=S.FILL_STEPS * S.ENV_NUM,
            batch_size=S.BATCH_SIZE,
            gamma=S.DISCOUNT,
            train_freq=1,
            gradient_steps=S.UPDATES_PER_STEP,
            # counted in environment steps
            target_update_interval=S.TARGET_UPDATE // S.UPDATES_PER_STEP * S.ENV_NUM,
            exploration_initial_eps=S.EPSILON,
            exploration_final_eps=S.EPSILON,
            max_grad_norm=math.inf,
            policy_kwargs={
                "net_arch": list(S.HIDDEN_SIZES),
                "optimizer_kwargs": {"fused": True} if fused else {},
            },
            seed=seed,
            device="cpu",
        )
        self.run(S.FILL_STEPS)

    @property
    def updates(self) -> int:
        return self.model._n_updates

    def run(self, steps: int) -> None:
        """Step all environments ``steps`` times, with the updates after each."""
        self.model.learn(steps * S.ENV_NUM, reset_num_timesteps=False, log_interval=10**9)


class TianshouDQN:
    """tianshou's DQN: its collector, buffer and algorithm, driven by a custom loop.

    Its trainer would look through the whole buffer for NaN after each collecting and cost it time,
    so it is left out.
    """

    def __init__(self, seed: int = 0, *, fused: bool) -> None:
        from tianshou.algorithm import DQN
        from tianshou.algorithm.modelfree.dqn import DiscreteQLearningPolicy
        from tianshou.algorithm.optim import TorchOptimizerFactory
        from tianshou.data import Collector, VectorReplayBuffer
        from tianshou.env import DummyVectorEnv
        from tianshou.utils.net.common import Net

        torch.manual_seed(seed)
        np.random.seed(seed)
        env = S.make_env()
        model = Net(
            state_shape=(S.OBS_SIZE,), action_shape=(S.ACTION_NUM,), hidden_sizes=S.HIDDEN_SIZES
        )
        self.policy = DiscreteQLearningPolicy(
            model=model,
            action_space=env.action_space,
            observation_space=env.observation_space,
            eps_training=S.EPSILON,
        )
        self.algorithm = DQN(
            policy=self.policy,
            optim=TorchOptimizerFactory(
                torch.optim.Adam, lr=S.LEARNING_RATE, fused=True if fused else None
            ),
            gamma=S.DISCOUNT,
            target_update_freq=S.TARGET_UPDATE,
            is_double=False,
            huber_loss_delta=1.0,
        )
        envs = DummyVectorEnv([S.make_env for _ in range(S.ENV_NUM)])
        envs.seed(seed)
        self.buffer = VectorReplayBuffer(S.BUFFER_SIZE, S.ENV_NUM)
        self.collector = Collector(self.policy, envs, self.buffer, exploration_noise=True)
        self.collector.reset()
        self.updates = 0
        self.collect(S.FILL_STEPS)

    def run(self, steps: int) -> None:
        """Step all environments ``steps`` times, with the updates after each."""
        from tianshou.utils.torch_utils import policy_within_training_step

        with policy_within_training_step(self.policy):
            for _ in range(steps):
                self.collector.collect(n_step=S.ENV_NUM)
                for _ in range(S.UPDATES_PER_STEP):
                    self.algorithm.update(sample_size=S.BATCH_SIZE, buffer=self.buffer)
                    self.updates += 1

    def collect(self, steps: int) -> None:
        """Step all environments ``steps`` times in one call of the collector, without updates."""
        from tianshou.utils.torch_utils import policy_within_training_step

        with policy_within_training_step(self.policy):
            self.collector.collect(n_step=steps * S.ENV_NUM)
