"""Rewards for new observations in a chain: they find what random actions do not, and resume."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

from dmiddleware import Task
from dmiddleware.data import TensorBuffer
from dmiddleware.env import BaseEnvManager, make_env_manager
from dmiddleware.policy import DQNPolicy, PPOPolicy
from dmiddleware.reward import ICM, RND, IntrinsicCritic
from dmiddleware.rollout import evaluate_episodes
from middleware import (
    IntrinsicAdvantage,
    OffPolicyLearner,
    OnlineRLContext,
    OnPolicyLearner,
    RewardLearner,
    SnapshotSaver,
    StepCollector,
    data_pusher,
    eps_greedy_handler,
    gae_estimator,
)
from tests.dmiddleware.corridor import Corridor

LENGTH = 20


def corridor(length: int = LENGTH, env_num: int = 16) -> BaseEnvManager:
    maker = functools.partial(Corridor, env_num, length)
    return make_env_manager(maker, env_num=env_num, mode="vector", seed=0)


class PPORun:
    """PPO in the corridor, with a reward for new places or without."""

    def __init__(
        self,
        kind: Any = None,
        *,
        own_critic: bool = False,
        length: int = LENGTH,
        n_sample: int = 1024,
    ) -> None:
        envs = corridor(length)
        self.policy = PPOPolicy.for_env(
            envs,
            seed=0,
            learning_rate=1e-3,
            entropy_weight=0.01,
            batch_size=256,
            epoch_per_collect=4,
        )
        self.task = Task(OnlineRLContext(), seed=0)
        self.task.use(StepCollector(self.policy, envs, n_sample=n_sample))
        if kind is not None:
            self.model = kind.for_env(envs, self.policy, hidden_sizes=(64,))
        if kind is not None and not own_critic:
            self.task.use(RewardLearner(self.model, weight=0.1, env_weight=1.0))
        self.task.use(gae_estimator(self.policy))
        if own_critic:
            self.critic = IntrinsicCritic.for_env(envs, self.policy, hidden_sizes=(64,))
            self.task.use(IntrinsicAdvantage(self.model, self.critic))
        self.task.use(OnPolicyLearner(self.policy))


def mean_return(policy: Any) -> float:
    with corridor() as envs:
        returns = evaluate_episodes(policy.eval_mode, envs, 16).get_episode_return()
    return sum(returns) / len(returns)


@pytest.mark.learning
@pytest.mark.parametrize(
    ("kind", "own_critic", "max_step"),
    [
        pytest.param(None, False, 35, id="PPO", marks=pytest.mark.slow),
        pytest.param(RND, False, 35, id="RND", marks=pytest.mark.slow),
        pytest.param(ICM, False, 20, id="ICM"),
        pytest.param(RND, True, 35, id="RND with a critic", marks=pytest.mark.slow),
    ],
)
def test_ppo_finds_the_end_of_the_corridor_with_a_reward_for_new_places(
    kind: Any, own_critic: bool, max_step: int
) -> None:
    run = PPORun(kind, own_critic=own_critic)
    with run.task:
        run.task.run(max_step=max_step)
    found = mean_return(run.policy)
    assert found == 0.0 if kind is None else found > 0.9


@pytest.mark.parametrize(("kind", "own_critic"), [(RND, False), (RND, True), (ICM, False)])
def test_a_resumed_run_has_the_same_rewards(
    kind: Any, own_critic: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Otherwise the ids of the episodes of two runs differ, whatever the seeds.
    monkeypatch.setattr("secrets.randbits", lambda n_bits: 7)

    def outcome(run: PPORun) -> list[torch.Tensor]:
        learned = run.model.state_dict()["components"]["predictor" if kind is RND else "curiosity"]
        parameters = run.policy.model.parameters()
        return [one.detach().clone() for one in (*learned.values(), *parameters)]

    make = functools.partial(PPORun, kind, own_critic=own_critic, length=4, n_sample=64)
    whole = make()
    with whole.task:
        whole.task.run(max_step=4)
    stopped, snapshots = make(), SnapshotSaver(tmp_path)
    with stopped.task:
        stopped.task.use(snapshots).run(max_step=2)
        snapshots.save(stopped.task)
    resumed, snapshots = make(), SnapshotSaver(tmp_path)
    with resumed.task:
        assert snapshots.resume(resumed.task.use(snapshots))
        resumed.task.run(max_step=2)
    for one, other in zip(outcome(resumed), outcome(whole), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("weight", [0.0, 0.5])
def test_dqn_learns_from_both_rewards_and_their_parts_are_kept(
    weight: float, run_steps: Any
) -> None:
    envs = corridor(env_num=4)
    policy = DQNPolicy.for_env(envs, seed=0)
    buffer = TensorBuffer(1000, seed=0)
    ctx = run_steps(
        eps_greedy_handler(policy),
        StepCollector(policy, envs, n_sample=64),
        RewardLearner(RND.for_env(envs, policy), weight=weight, env_weight=1.0),
        data_pusher(buffer),
        OffPolicyLearner(policy, buffer),
        n_steps=2,
    )
    assert ctx.train_iter == 2
    stored = buffer.get(buffer.index)
    assert (stored["learned_reward"] > 0).all()
    torch.testing.assert_close(stored["reward"], weight * stored["learned_reward"])
