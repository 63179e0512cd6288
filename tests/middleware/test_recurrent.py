"""Recurrent policies in a chain."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dmiddleware import Task, middleware
from dmiddleware.data import PrioritySampler, TensorBuffer
from dmiddleware.env import make_env_manager
from dmiddleware.errors import ConfigError
from dmiddleware.files.serialization import pack
from dmiddleware.policy import (
    Policy,
    R2D2Policy,
    RecurrentMAPPOPolicy,
    RecurrentPPOPolicy,
    RecurrentQMIXPolicy,
)
from dmiddleware.rl import Schedule
from dmiddleware.tree import leaves
from middleware import (
    OffPolicyLearner,
    OnlineRLContext,
    OnPolicyLearner,
    SnapshotSaver,
    StepCollector,
    data_pusher,
    eps_greedy_handler,
    gae_estimator,
    interaction_evaluator,
)
from tests.dmiddleware.recurrent_policy import GRUPolicy, masked_cartpole
from tests.dmiddleware.team_envs import CountingTeam
from tests.variants import mostly_slow

N_STEPS = 12
SMALL = {"hidden_size": 8, "encoder_hidden_sizes": [8], "head_hidden_sizes": [8]}


@middleware(reads=("trajectories",), writes=("train_data",))
def hand_over(ctx: Any) -> None:
    """Learn from what was collected, as it is."""
    ctx.train_data = ctx.trajectories


def custom_chain(collect_env: Any) -> tuple[Policy, list[Any]]:
    """A policy of the user's own."""
    policy = GRUPolicy(seed=0)
    learner = OnPolicyLearner(policy)
    return policy, [StepCollector(policy, collect_env, n_sample=10), hand_over, learner]


ON_POLICY: dict[str, Any] = {
    "model": SMALL,
    "obs_norm": True,
    "learning_rate": 1e-2,
    "batch_size": 5,
    "epoch_per_collect": 2,
}


def on_policy_parts(policy: Policy, collect_env: Any) -> list[Any]:
    return [
        StepCollector(policy, collect_env, n_sample=10),
        gae_estimator(policy),
        OnPolicyLearner(policy),
    ]


def ppo_chain(collect_env: Any) -> tuple[Policy, list[Any]]:
    policy = RecurrentPPOPolicy.for_env(
        collect_env,
        seed=0,
        reward_norm=True,
        **ON_POLICY,
    )
    return policy, on_policy_parts(policy, collect_env)


def team_chain(collect_env: Any) -> tuple[Policy, list[Any]]:
    policy = RecurrentMAPPOPolicy.for_env(
        collect_env,
        seed=0,
        value_norm=True,
        **ON_POLICY,
    )
    return policy, on_policy_parts(policy, collect_env)


def envs_for(chain: object, seed: int) -> Any:
    if chain in (team_chain, qmix_chain):
        kwargs = {"length": 7, "leaves": {1: 4}}
        return make_env_manager(CountingTeam, env_num=2, seed=seed, env_kwargs=kwargs)
    return masked_cartpole(2, seed=seed)


def buffer_for(**options: Any) -> TensorBuffer:
    return TensorBuffer(
        100,
        sampler=PrioritySampler(alpha=0.9, beta=0.6),
        unroll_len=4,
        stride=2,
        seed=0,
        **options,
    )


def q_chain(cls: type[R2D2Policy], collect_env: Any) -> tuple[Policy, list[Any]]:
    policy = cls.for_env(
        collect_env,
        seed=0,
        model=SMALL,
        burn_in=2,
        learning_rate=1e-2,
        batch_size=3,
        eps=Schedule.linear(0.5, 0.1, decay=100),
    )
    buffer = buffer_for()
    return policy, [
        eps_greedy_handler(policy),
        StepCollector(policy, collect_env, n_sample=10),
        data_pusher(buffer),
        OffPolicyLearner(policy, buffer, update_per_collect=2, learn_start=30),
    ]


def r2d2_chain(collect_env: Any) -> tuple[Policy, list[Any]]:
    return q_chain(R2D2Policy, collect_env)


def qmix_chain(collect_env: Any) -> tuple[Policy, list[Any]]:
    return q_chain(RecurrentQMIXPolicy, collect_env)


class Run:
    """Collects, learns through time and evaluates; keeps what was collected."""

    def __init__(self, folder: Path, make_chain: Callable[[Any], tuple[Policy, list[Any]]]) -> None:
        self.policy, chain = make_chain(envs_for(make_chain, seed=1))
        self.batches: list[Any] = []
        self.evaluations: list[float] = []
        self.snapshots = SnapshotSaver(folder)
        self.task = Task(OnlineRLContext(), seed=0)
        eval_env = envs_for(make_chain, seed=2)
        evaluator = interaction_evaluator(self.policy, eval_env, n_episode=2, every_train_iter=3)
        for one in (self.snapshots, *chain, evaluator, self.note):
            self.task.use(one)

    def note(self, ctx: Any) -> None:
        self.batches.append(ctx.trajectories)
        if ctx.eval_value is not None:
            self.evaluations.append(ctx.eval_value)

    def state(self) -> tuple[bytes, dict[str, torch.Tensor]]:
        """Return all that the policy has learned."""
        return pack(self.policy.learn_mode.state_dict())


@pytest.mark.parametrize(
    ("chain", "stopped_after"),
    mostly_slow(
        itertools.product([custom_chain, ppo_chain, r2d2_chain, team_chain, qmix_chain], [1, 5]),
        keep=[0, 3, 4, 7, 9],
    ),
)
def test_a_run_resumed_in_the_middle_of_an_episode_is_exact(
    tmp_path: Path, chain: Any, stopped_after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Otherwise the ids of the episodes of two runs differ, whatever the seeds.
    monkeypatch.setattr("secrets.randbits", lambda n_bits: 7)
    whole = Run(tmp_path / "whole", chain)
    with whole.task:
        whole.task.run(max_step=N_STEPS)
        assert whole.task.ctx.train_iter > 10
    stopped = Run(tmp_path / "run", chain)
    with stopped.task:
        stopped.task.run(max_step=stopped_after)
        stopped.snapshots.save(stopped.task)
    assert not stopped.batches[-1]["done"][-1].all()
    resumed = Run(tmp_path / "run", chain)
    with resumed.task:
        assert resumed.snapshots.resume(resumed.task)
        resumed.task.run(max_step=N_STEPS - stopped_after)
    continues = ~resumed.batches[0]["is_first"][0]
    assert continues.any()
    assert (resumed.batches[0]["state"][0][continues] != 0).any()
    for expected, found in zip(whole.batches, stopped.batches + resumed.batches, strict=True):
        assert set(expected) == set(found)
        rows, others = dict(leaves(expected)), dict(leaves(found))
        assert [name for name in rows if not torch.equal(rows[name], others[name])] == []
    assert stopped.evaluations + resumed.evaluations == whole.evaluations
    (plain, tensors), (other_plain, others) = whole.state(), resumed.state()
    assert plain == other_plain
    assert all(torch.equal(leaf, others[name]) for name, leaf in tensors.items())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"burn_in": 1}, "burn_in=1, but the policy has burn_in=2"),
        ({"n_step": 5}, "n_step=5, but the policy has n_step=1"),
    ],
)
def test_a_buffer_that_does_not_fit_the_policy_is_rejected(
    options: dict[str, Any], message: str
) -> None:
    with masked_cartpole(1) as envs:
        policy = R2D2Policy.for_env(envs, model=SMALL, burn_in=2)
    with pytest.raises(ConfigError, match=message):
        OffPolicyLearner(policy, buffer_for(**options))
