"""Hindsight experience replay in a chain: which algorithms learn with it, and that it helps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from dmiddleware import Task
from dmiddleware.data import HindsightReplay, TensorBuffer
from dmiddleware.env import BaseEnvManager, make_env_manager
from dmiddleware.errors import ConfigError
from dmiddleware.policy import DDPGPolicy, DQNPolicy, SACPolicy, TD3Policy
from dmiddleware.rl import Schedule
from dmiddleware.rollout import evaluate_episodes
from examples.bit_flipping import compute_reward, reached
from middleware import (
    OffPolicyLearner,
    OnlineRLContext,
    SnapshotSaver,
    StepCollector,
    data_pusher,
    eps_greedy_handler,
)
from tests.dmiddleware.goal_envs import PointGoal, near

BITS = "examples.bit_flipping:BitFlipping-v0"


def bit_envs(env_num: int, n_bits: int, seed: int) -> BaseEnvManager:
    return make_env_manager(
        BITS, env_num=env_num, mode="vector", env_kwargs={"n_bits": n_bits}, seed=seed
    )


class BitRun:
    """DQN on a few bits."""

    def __init__(self, n_bits: int, *, hindsight: bool) -> None:
        envs = bit_envs(16, n_bits, seed=0)
        self.policy = DQNPolicy.for_env(
            envs,
            seed=0,
            model={"encoder_hidden_sizes": [256]},
            discount=0.98,
            target_update_freq=1,
            target_tau=0.05,
            batch_size=128,
            eps=Schedule.linear(0.2, 0.05, decay=2000),
        )
        transform = HindsightReplay(compute_reward, compute_terminated=reached)
        self.buffer = TensorBuffer(
            20_000, follow_episodes=True, transform=transform if hindsight else None, seed=0
        )
        self.task = Task(OnlineRLContext(), seed=0)
        self.task.use(eps_greedy_handler(self.policy))
        self.task.use(StepCollector(self.policy, envs, n_sample=16 * n_bits))
        self.task.use(data_pusher(self.buffer))
        self.task.use(OffPolicyLearner(self.policy, self.buffer, update_per_collect=40))


def success_rate(policy: Any, envs: BaseEnvManager, n_episode: int = 100) -> float:
    with envs:
        return evaluate_episodes(policy.eval_mode, envs, n_episode).mean_info()["is_success"]


@pytest.mark.slow
@pytest.mark.learning
def test_dqn_flips_bits_to_a_goal_with_hindsight_and_not_without() -> None:
    n_bits = 10
    rates = {}
    for hindsight in (True, False):
        run = BitRun(n_bits, hindsight=hindsight)
        with run.task:
            run.task.run(max_step=25)
        rates[hindsight] = success_rate(run.policy, bit_envs(50, n_bits, seed=1))
    assert rates[True] > 0.8
    assert rates[False] < 0.2


@pytest.mark.parametrize("policy_class", [SACPolicy, TD3Policy, DDPGPolicy])
def test_policies_for_continuous_actions_learn_from_new_goals(
    policy_class: Any, run_steps: Any
) -> None:
    envs = make_env_manager(PointGoal, env_num=2, seed=0)
    policy = policy_class.for_env(envs, seed=0, batch_size=16)
    buffer = TensorBuffer(500, follow_episodes=True, transform=HindsightReplay(near), seed=0)
    before = {name: p.clone() for name, p in policy.model.named_parameters()}
    ctx = run_steps(
        StepCollector(policy, envs, n_sample=50),
        data_pusher(buffer),
        OffPolicyLearner(policy, buffer, update_per_collect=4),
        n_steps=2,
    )
    assert ctx.train_iter == 8
    after = dict(policy.model.named_parameters())
    assert any(not torch.equal(after[name], before[name]) for name in before)


def test_policy_with_n_step_targets_is_refused() -> None:
    envs = bit_envs(2, 4, seed=0)
    policy = DQNPolicy.for_env(envs, n_step=3)
    buffer = TensorBuffer(100, follow_episodes=True, transform=HindsightReplay(compute_reward))
    with pytest.raises(ConfigError, match="n_step=3"):
        OffPolicyLearner(policy, buffer)


def test_a_resumed_run_draws_the_same_goals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Otherwise the ids of the episodes of two runs differ, whatever the seeds.
    monkeypatch.setattr("secrets.randbits", lambda n_bits: 7)

    def weights(run: BitRun) -> list[torch.Tensor]:
        return [p.detach().clone() for p in run.policy.model.parameters()]

    whole = BitRun(6, hindsight=True)
    with whole.task:
        whole.task.run(max_step=5)
    stopped = BitRun(6, hindsight=True)
    snapshots = SnapshotSaver(tmp_path)
    with stopped.task:
        stopped.task.use(snapshots).run(max_step=2)
        snapshots.save(stopped.task)
    resumed = BitRun(6, hindsight=True)
    snapshots = SnapshotSaver(tmp_path)
    with resumed.task:
        assert snapshots.resume(resumed.task.use(snapshots))
        resumed.task.run(max_step=3)
    for one, other in zip(weights(resumed), weights(whole), strict=True):
        assert torch.equal(one, other)
