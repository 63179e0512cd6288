"""Which episodes a step ends and begins."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from dmiddleware.env import AsyncEnvManager
from dmiddleware.rollout.stepper import Stepper
from tests.dmiddleware.counting_env import CountingEnv, ExitsOnce


@pytest.mark.process
def test_the_episode_that_ends_is_that_of_its_env_though_the_rows_are_not_sorted(
    batched_policy, tmp_path
):
    env_fns = [
        functools.partial(CountingEnv, 0, (9,)),
        functools.partial(ExitsOnce, 1, tmp_path / "failed"),
        functools.partial(CountingEnv, 2, (3,)),
        functools.partial(CountingEnv, 3, (9,)),
    ]
    with AsyncEnvManager(env_fns, envs_per_process=2) as envs:
        stepper = Stepper(batched_policy.collect_mode, envs, user="the test")
        for _ in range(2):
            stepper.step({})
        before = stepper.episode_id
        # Env 0 shares the process of env 1, which fails, and so is in the timestep too.
        step = stepper.step({}, only=np.array([1, 2, 3]))
        assert step.timestep.env_id.tolist() == [1, 2, 3, 0]
        assert list(step.ended) == [2]
        assert list(step.begun) == [1, 0, 2]
        assert (stepper.episode_id != before).tolist() == [True, True, True, False]
        assert batched_policy.resets[-2:] == [[1, 0], [2]]
