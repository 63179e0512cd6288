"""What is logged of envs that fail again and again."""

from __future__ import annotations

import logging
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from dmiddleware.env import make_env_manager
from dmiddleware.env.restart_limit import FailureBudget
from dmiddleware.errors import EnvCrashed, EnvTimeout
from dmiddleware.testing import FakeClock


def lines_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records]


@pytest.fixture(autouse=True)
def _warnings(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)


def test_the_first_failure_has_its_traceback_and_later_ones_one_line_a_minute(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = FakeClock()
    budget = FailureBudget(3, max_retry=1000, now=clock.now)
    for second in range(150):
        budget.record_exception(second % 3, "step", RuntimeError(f"boom {second}"))
        clock.advance(1.0)
    first, second, third = lines_of(caplog)
    assert "RuntimeError: boom 0" in first and "Traceback" not in second + third
    assert first.count("\n") > 0 and "\n" not in second + third
    assert "boom 60" in second and "61 restarts so far, 60 of them since the last line" in second
    assert "boom 120" in third and "121 restarts so far, 60 of them" in third
    assert budget.restarts == 150


def test_another_kind_of_failure_has_a_traceback_of_its_own(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = FakeClock()
    budget = FailureBudget(1, max_retry=1000, now=clock.now)
    for _ in range(20):
        budget.record_exception(0, "step", RuntimeError("boom"))
        budget.record_exception(0, "reset", ValueError("bang"))
        budget.record_failure(0, "step", EnvTimeout("did not answer in 3 s"), "the stack")
        budget.record_failure(0, "step", EnvCrashed("died"), "no stack")
    assert [line.partition("; ")[0] for line in lines_of(caplog)] == [
        "env 0 failed in step: it raised RuntimeError: boom",
        "env 0 failed in reset: it raised ValueError: bang",
        "env 0 failed in step: it did not answer in 3 s",
        "env 0 failed in step: it died",
    ]
    assert all("\n" in line for line in lines_of(caplog))


class Crashing(gym.Env[Any, Any]):
    """Raises in every seventh step of an episode."""

    observation_space = gym.spaces.Box(-1.0, 1.0, (2,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.t = 0
        return np.zeros(2, np.float32), {}

    def step(self, action: Any) -> Any:
        self.t += 1
        if self.t == 7:
            raise RuntimeError("the simulator crashed")
        return np.zeros(2, np.float32), 1.0, False, False, {}


@pytest.mark.process
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_envs_that_crash_often_log_one_traceback(
    mode: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with make_env_manager(Crashing, env_num=2, mode=mode, max_retry=100, seed=0) as envs:
        for _ in range(30):
            envs.step(np.zeros(2, np.int64))
        assert envs.restarts == 8
    assert caplog.text.count("Traceback (most recent call last)") == 1
    assert caplog.text.count("the simulator crashed; restarting it") == 1
