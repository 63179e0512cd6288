"""Env managers.

The reference steps the same environments without us, with the same actions. "EnvPool" is EnvPool's
own `step`, which counts the steps that its environments spend on resets as steps. "bare loop" is
the `step` of Gymnasium's vectorized CartPole. In the last row both sides choose actions with the
same Q-network, and the bare loop throws all rows away, while the collector returns batches of 32
steps.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
import torch

from dmiddleware.env import make_env_manager
from dmiddleware.policy import DQNPolicy
from dmiddleware.rollout import RolloutCollector
from tests.benchmarks.report import Row, interleaved

ENVPOOL = {"Pong-v5": 20, "HalfCheetah-v4": 100}  # steps of all envs a turn
ENVPOOL_NUM = 64
VECTOR_NUM = 512
VECTOR_STEPS = 512
STEPS_PER_CALL = 32


def rows() -> list[Row]:
    """Measure environment steps per second."""
    return [*(envpool(env, steps) for env, steps in ENVPOOL.items()), vector(), collect()]


def envpool(env: str, n_steps: int) -> Row:
    """Step EnvPool's envs through the manager, and alone."""
    import envpool as library

    with (
        warnings.catch_warnings(),
        make_env_manager(env, env_num=ENVPOOL_NUM, seed=0, backend="envpool") as envs,
    ):
        warnings.simplefilter("ignore")  # EnvPool's spaces
        seeds = list(range(ENVPOOL_NUM))
        pool = library.make_gymnasium(env, num_envs=ENVPOOL_NUM, seed=seeds)
        pool.reset()
        actions = [envs.sample_actions() for _ in range(n_steps)]
        pair = interleaved(each(envs.step, actions), each(pool.step, actions))
        pool.close()
    return Row.of_rate(
        f"EnvPool's {env}, {ENVPOOL_NUM} envs",
        pair,
        count=n_steps * ENVPOOL_NUM,
        unit="env steps/s",
        against="EnvPool",
        at_least=0.9,
    )


def vector() -> Row:
    """Step a vectorized env through the manager, and alone."""
    bare = gym.make_vec("CartPole-v1", num_envs=VECTOR_NUM, vectorization_mode="vector_entry_point")
    bare.reset(seed=0)
    with make_env_manager("CartPole-v1", env_num=VECTOR_NUM, mode="vector", seed=0) as envs:
        actions = [envs.sample_actions() for _ in range(VECTOR_STEPS)]
        pair = interleaved(each(envs.step, actions), each(bare.step, actions))
    return Row.of_rate(
        f"vectorized CartPole-v1, {VECTOR_NUM} envs",
        pair,
        count=VECTOR_STEPS * VECTOR_NUM,
        unit="env steps/s",
        against="bare loop",
        at_least=0.8,
    )


def collect() -> Row:
    """Collect batches from a vectorized env, and step it with the same network."""
    bare = gym.make_vec("CartPole-v1", num_envs=VECTOR_NUM, vectorization_mode="vector_entry_point")
    with make_env_manager("CartPole-v1", env_num=VECTOR_NUM, mode="vector", seed=0) as envs:
        policy = DQNPolicy.for_env(envs, seed=0, modes=["collect"])
        collector = RolloutCollector(policy, envs)
        kwargs: dict[str, Any] = {"eps": 0.1}
        obs, _ = bare.reset(seed=0)
        env_id = np.arange(VECTOR_NUM)

        def ours() -> None:
            for _ in range(VECTOR_STEPS // STEPS_PER_CALL):
                collector.collect(STEPS_PER_CALL * VECTOR_NUM, policy_kwargs=kwargs)

        def reference() -> None:
            nonlocal obs
            for _ in range(VECTOR_STEPS):
                seen = torch.from_numpy(obs)
                output = policy.collect_mode.forward(seen, env_id=env_id, **kwargs)
                obs = bare.step(output["action"].numpy())[0]

        pair = interleaved(ours, reference)
    return Row.of_rate(
        f"collecting from it, {STEPS_PER_CALL} steps a call",
        pair,
        count=VECTOR_STEPS * VECTOR_NUM,
        unit="env steps/s",
        against="bare loop with the network",
    )


def each(step: Callable[[Any], Any], actions: list[Any]) -> Callable[[], None]:
    def run() -> None:
        for action in actions:
            step(action)

    return run
