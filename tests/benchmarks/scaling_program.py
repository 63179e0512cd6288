"""The program of the scaling benchmark, which only collects; ``ditask`` starts it.

The environment variables ``SCALING_ENV`` (``sleep`` or ``cartpole``), ``SCALING_ENV_NUM`` (envs of
a collector), ``SCALING_N_SAMPLE`` and ``SCALING_SECONDS`` say what; the learner takes batches and
prints the rate.
"""

from __future__ import annotations

import os
import time
from typing import Any

import gymnasium as gym
import numpy as np
import torch

from dmiddleware import Task
from dmiddleware.env import make_env_manager
from dmiddleware.pipeline import Middleware, middleware
from dmiddleware.policy import DQNPolicy
from middleware import (
    ContextExchanger,
    ModelExchanger,
    OnlineRLContext,
    Role,
    StepCollector,
    eps_greedy_handler,
)
from tests.benchmarks import setting as S

STEP_S = 0.002


class SleepEnv(gym.Env[Any, Any]):
    """An environment that sleeps for 2 ms in each step."""

    observation_space = gym.spaces.Box(-1.0, 1.0, (S.OBS_SIZE,), np.float32)
    action_space = gym.spaces.Discrete(S.ACTION_NUM)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self._steps = 0
        return self._observe(), {}

    def step(self, action: Any) -> Any:
        time.sleep(STEP_S)
        self._steps += 1
        return self._observe(), 1.0, self._steps == 200, False, {}

    def _observe(self) -> Any:
        return self.np_random.uniform(-1.0, 1.0, S.OBS_SIZE).astype(np.float32)


def measure_rate(seconds: float, n_collectors: int) -> Middleware[OnlineRLContext]:
    """Stop after ``seconds``; print the rate since every collector was first heard from."""
    heard: set[int] = set()
    began = begun_at = 0.0

    @middleware(roles=(Role.LEARNER,), reads=("env_step", "trajectories"))
    def measure_rate(ctx: OnlineRLContext) -> None:
        nonlocal began, begun_at
        heard.add(int(ctx.trajectories["episode_id"].reshape(-1)[0]) >> 28)
        now = time.perf_counter()
        if not began:
            if len(heard) == n_collectors:
                began, begun_at = now, ctx.env_step
        elif now - began >= seconds:
            print(f"rate {(ctx.env_step - begun_at) / (now - began):.1f}", flush=True)
            ctx.task.stop("measured")

    return measure_rate


def make_policy() -> DQNPolicy:
    """Build the network of the other benchmarks of collecting."""
    model = {
        "obs_shape": S.OBS_SIZE,
        "action_shape": S.ACTION_NUM,
        "encoder_hidden_sizes": S.HIDDEN_SIZES,
    }
    return DQNPolicy({"seed": 0, "model": model, "eps": S.EPSILON})


def main() -> None:
    """Collect, in one process or in many."""
    torch.set_num_threads(1)
    policy = make_policy()
    make = SleepEnv if os.environ["SCALING_ENV"] == "sleep" else S.make_env
    with Task(OnlineRLContext(), seed=0) as task:
        envs = make_env_manager(
            make,
            env_num=int(os.environ["SCALING_ENV_NUM"]),
            seed=task.seed_for("collector"),
        )
        task.use(ContextExchanger()).use(ModelExchanger(policy))
        task.use(eps_greedy_handler(policy))
        n_sample = int(os.environ["SCALING_N_SAMPLE"])
        task.use(StepCollector(policy.collect_mode, envs, n_sample=n_sample))
        task.use(
            measure_rate(
                float(os.environ["SCALING_SECONDS"]), int(os.environ["SCALING_COLLECTORS"])
            )
        )
        task.run()


if __name__ == "__main__":
    main()
