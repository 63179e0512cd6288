"""A warning where many envs leave few steps of each for returns to look ahead."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from dmiddleware.data import TensorBuffer
from dmiddleware.env import make_env_manager
from dmiddleware.pipeline import Task
from dmiddleware.policy import (
    A2CPolicy,
    DQNPolicy,
    IMPALAPolicy,
    Policy,
    PPOPolicy,
    PQNPolicy,
    RecurrentPPOPolicy,
)
from middleware import (
    DataPusher,
    EpsGreedyHandler,
    GAEEstimator,
    OffPolicyLearner,
    OnPolicyLearner,
    StepCollector,
)

SMALL = {"encoder_hidden_sizes": [8]}


def warnings_of(
    caplog: pytest.LogCaptureFixture,
    policy_cls: type[Policy],
    *,
    env_num: int,
    n_sample: int,
    off_policy: bool = False,
    **options: Any,
) -> list[str]:
    """Train for two steps, and return what is warned of."""
    envs = make_env_manager("dmiddleware.zoo.tensor_envs:CartPole", env_num=env_num, seed=0)
    policy = policy_cls.for_env(envs, seed=0, **{"batch_size": 1024, "model": SMALL, **options})
    with caplog.at_level(logging.WARNING), Task(seed=0) as task:
        if not policy.explores:
            task.use(EpsGreedyHandler(policy))
        task.use(StepCollector(policy, envs, n_sample=n_sample))
        if off_policy:
            buffer = TensorBuffer(10_000, seed=0)
            task.use(DataPusher(buffer)).use(OffPolicyLearner(policy, buffer))
        else:
            if not policy.learns_from_trajectories:
                task.use(GAEEstimator(policy))
            task.use(OnPolicyLearner(policy))
        task.run(max_step=1)
        task.run(max_step=2)
    return [record.getMessage() for record in caplog.records]


@pytest.mark.parametrize("policy_cls", [PPOPolicy, A2CPolicy, IMPALAPolicy, PQNPolicy])
def test_one_step_of_each_of_many_envs_is_warned_of_once(
    policy_cls: type[Policy], caplog: pytest.LogCaptureFixture
) -> None:
    (told,) = warnings_of(caplog, policy_cls, env_num=256, n_sample=200)
    assert "1 step of each env" in told
    assert "n_sample is 200 and there are 256 envs" in told
    assert "--collector.n-sample 8192 --policy.batch-size 256" in told


def test_the_advised_steps_are_enough(caplog: pytest.LogCaptureFixture) -> None:
    assert not warnings_of(caplog, PPOPolicy, env_num=64, n_sample=2048, epoch_per_collect=1)


@pytest.mark.parametrize(("env_num", "n_sample"), [(8, 8), (32, 64), (64, 4 * 64)])
def test_few_envs_or_four_steps_of_each_are_not_warned_of(
    env_num: int, n_sample: int, caplog: pytest.LogCaptureFixture
) -> None:
    assert not warnings_of(caplog, A2CPolicy, env_num=env_num, n_sample=n_sample)


def test_algorithms_that_learn_from_single_steps_are_not_warned_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert not warnings_of(caplog, DQNPolicy, env_num=256, n_sample=256, off_policy=True)
    assert not warnings_of(caplog, PQNPolicy, env_num=256, n_sample=256, trace_decay=0.0)
    assert not warnings_of(caplog, PPOPolicy, env_num=256, n_sample=256, gae_lambda=0.0)


def test_a_memory_needs_several_steps_even_with_one_step_returns(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = {**SMALL, "hidden_size": 8}
    options = {"gae_lambda": 0.0, "model": model}
    told = warnings_of(caplog, RecurrentPPOPolicy, env_num=128, n_sample=256, **options)
    assert "2 steps of each env" in told[0]
