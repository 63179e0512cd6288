"""A small training whose metrics are sent to a service."""

from __future__ import annotations

from typing import Any

import numpy as np

from dmiddleware.data import TensorBuffer
from dmiddleware.env import make_env_manager
from dmiddleware.pipeline import Task
from dmiddleware.policy import DQNPolicy
from middleware import (
    Experiment,
    OffPolicyLearner,
    OnlineRLContext,
    RunFolder,
    StepCollector,
    data_pusher,
    eps_greedy_handler,
)

__all__ = ["evaluate", "train_tracked"]


def evaluate(ctx: OnlineRLContext) -> None:
    """Write an evaluation with a video in every fifth step."""
    if ctx.total_step % 5 == 4:
        ctx.eval_value = float(ctx.env_step)
        ctx.eval_output = {"return_std": 1.0, "video": np.zeros((1, 3, 3, 8, 8), np.uint8)}


def train_tracked(run: RunFolder, *trackers: Any, n_steps: int = 10, env_step: int = 0) -> None:
    """Train a small DQN with an experiment that is also sent."""
    with Task(OnlineRLContext(env_step=env_step), seed=0) as task:
        envs = make_env_manager("CartPole-v1", env_num=2, seed=0)
        policy = DQNPolicy.for_env(envs, seed=0, batch_size=8)
        buffer = TensorBuffer(1000, seed=0)
        experiment = Experiment(run, policy)
        task.use(eps_greedy_handler(policy))
        task.use(StepCollector(policy, envs, n_sample=8))
        task.use(data_pusher(buffer))
        task.use(OffPolicyLearner(policy, buffer))
        task.use(evaluate).use(experiment)
        for tracker in trackers:
            task.use(tracker)
        task.run(max_step=n_steps)
