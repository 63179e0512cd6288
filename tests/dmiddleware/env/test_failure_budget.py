"""The log of envs that fail again and again."""

from __future__ import annotations

import functools
import logging
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from dmiddleware.env import VectorEnvManager, make_env_manager
from dmiddleware.env.failure_budget import FailureBudget
from dmiddleware.errors import EnvCrashed, EnvTimeout
from dmiddleware.launch.mistakes import is_mistake
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


class Unfinished(gym.Wrapper[Any, Any, Any, Any]):
    """Has a mistake in its code, in the method that ``where`` names."""

    def __init__(self, mistake: str, where: str) -> None:
        super().__init__(Crashing())
        self.mistake, self.where = mistake, where
        self._fail_in("start")

    def reset(self, **kwargs: Any) -> Any:
        self._fail_in("reset")
        return super().reset(**kwargs)

    def step(self, action: Any) -> Any:
        self._fail_in("step")
        return super().step(action)

    def _fail_in(self, where: str) -> None:
        if where != self.where:
            return
        if self.mistake == "import":
            import no_such_module  # noqa: F401  # type: ignore[import-not-found]
        if self.mistake == "name":
            no_such_name  # noqa: B018, F821  # type: ignore[name-defined]
        if self.mistake == "id":
            gym.make("NoSuchEnv-v0")
        try:
            len(3)  # type: ignore[arg-type]
        except TypeError as error:
            raise Unusual(3, 4) from error


class Unusual(RuntimeError):
    """Cannot be pickled: it has other arguments than its message."""

    def __init__(self, a: int, b: int) -> None:
        super().__init__(f"{a} is not {b}")


MISTAKES = {
    "import": "No module named 'no_such_module'",
    "name": "name 'no_such_name' is not defined",
    "id": "NoSuchEnv",
    "one behind another": "3 is not 4",
}


@pytest.mark.process
@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("where", ["start", "reset", "step"])
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_the_code_of_an_env_is_one_for_the_run_too(
    mode: Any, where: str, mistake: str
) -> None:
    make = functools.partial(Unfinished, mistake, where)
    envs = make_env_manager(make, env_num=1, mode=mode, max_retry=100)
    with pytest.raises(EnvCrashed, match=MISTAKES[mistake]) as caught, envs:
        for _ in range(100):
            envs.step(np.zeros(1, np.int64))
    assert envs.restarts <= 1
    assert is_mistake(caught.value, in_step=True)


@pytest.mark.parametrize("where", ["reset", "step"])
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_the_code_of_a_vector_env_is_one_for_the_run_too(
    where: str, mistake: str
) -> None:
    make = functools.partial(Unfinished, mistake, where)
    vector = functools.partial(gym.vector.SyncVectorEnv, [make, make])
    envs = VectorEnvManager(vector, 2, max_retry=100)
    with pytest.raises(EnvCrashed, match=MISTAKES[mistake]) as caught, envs:
        for _ in range(100):
            envs.step(np.zeros(2, np.int64))
    assert envs.restarts <= 1
    assert is_mistake(caught.value, in_step=True)
