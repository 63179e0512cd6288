"""What a user sees when an env fails or an argument is wrong."""

import functools
import traceback

import gymnasium as gym
import numpy as np
import pytest
from strange_envs import Fragile, Walk

from dmiddleware.env import AsyncEnvManager, SyncEnvManager, VectorEnvManager, make_env_manager
from dmiddleware.errors import ConfigError, EnvCrashed


def make_sync(env_fn, **kwargs):
    return SyncEnvManager([Walk, env_fn], seed=0, **kwargs)


def make_vector(env_fn, **kwargs):
    return VectorEnvManager(lambda: gym.vector.SyncVectorEnv([Walk, env_fn]), 2, seed=0, **kwargs)


@pytest.mark.parametrize("make", [make_sync, make_vector])
@pytest.mark.parametrize("where", ["make", "reset", "step"])
def test_a_failing_env_is_shown_with_one_traceback(make, where):
    manager = make(functools.partial(Fragile, where=where, at=1), max_retry=4)
    with pytest.raises(EnvCrashed) as caught, manager:
        for _ in range(10):
            manager.step(np.zeros(2, int))
    shown = "".join(traceback.format_exception(caught.value))
    assert shown.count("Traceback (most recent call last)") == 2  # ours, and the env's
    assert str(caught.value).count("in fail") == 1


@pytest.mark.parametrize("make", [make_sync, make_vector])
def test_the_first_failure_of_a_kind_is_logged_with_its_traceback_alone(make, caplog):
    with pytest.raises(EnvCrashed), make(functools.partial(Fragile, at=1), max_retry=4) as manager:
        for _ in range(10):
            manager.step(np.zeros(2, int))
    (record,) = caplog.records
    assert record.getMessage().count("Traceback (most recent call last)") == 1


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SyncEnvManager("CartPole-v1"), "env_fns.*CartPole-v1"),
        (lambda: SyncEnvManager([Walk, Walk()]), r"env_fns\[1\]"),
        (lambda: SyncEnvManager([]), "env_fns"),
        (lambda: SyncEnvManager(Walk), "env_fns"),
        (lambda: SyncEnvManager([Walk], max_retry=1.5), "max_retry.*1.5"),
        (lambda: SyncEnvManager([Walk], max_retry=True), "max_retry.*True"),
        (lambda: SyncEnvManager([Walk], max_retry=-1), "max_retry.*-1"),
        (lambda: SyncEnvManager([Walk], seed="7"), "seed.*'7'"),
        (lambda: SyncEnvManager([Walk], seed=0.5), "seed.*0.5"),
        (lambda: SyncEnvManager([Walk], seed=[0.5]), "seed.*0.5"),
        (lambda: AsyncEnvManager([None]), r"env_fns\[0\]"),
        (lambda: AsyncEnvManager([Walk], step_timeout_s="60"), "step_timeout_s.*'60'"),
        (lambda: AsyncEnvManager([Walk], close_timeout_s=True), "close_timeout_s.*True"),
        (lambda: AsyncEnvManager([Walk], envs_per_process=1.5), "envs_per_process.*1.5"),
        (lambda: VectorEnvManager("CartPole-v1", 2), "vector_fn.*CartPole-v1"),
        (lambda: VectorEnvManager(Walk, 0), "env_num.*0"),
        (lambda: VectorEnvManager(Walk, 2, max_retry="3"), "max_retry.*'3'"),
        (lambda: make_env_manager("CartPole-v1", env_num="8"), "env_num.*'8'"),
        (lambda: make_env_manager("CartPole-v1", env_num=1, wrappers=gym.Wrapper), "wrappers"),
        (lambda: make_env_manager("CartPole-v1", env_num=1, wrappers=[1]), r"wrappers\[0\].*1"),
        (lambda: make_env_manager("CartPole-v1", env_num=1, env_kwargs=[1]), "env_kwargs"),
    ],
)
def test_arguments_of_the_wrong_type_are_rejected(make, message):
    with pytest.raises(ConfigError, match=message):
        make()
