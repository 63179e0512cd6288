"""C51 and Rainbow ask for the range of returns where the default cannot hold them."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from dmiddleware.data import TensorBuffer
from dmiddleware.env import make_env_manager
from dmiddleware.errors import ConfigError
from dmiddleware.pipeline import Task
from dmiddleware.policy import C51Policy, DQNPolicy, Policy, RainbowPolicy
from middleware import DataPusher, OffPolicyLearner, StepCollector, TerminationChecker


class Paid(gym.Env[Any, Any]):
    """Pays the same in each step; an episode ends after some steps."""

    observation_space = gym.spaces.Box(0.0, 1.0, (2,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(
        self, reward: float, length: int, *, last: float | None = None, terminates: bool = True
    ) -> None:
        self._reward, self._length, self._terminates = reward, length, terminates
        self._last = reward if last is None else last
        self._step = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self._step = 0
        return np.zeros(2, np.float32), {}

    def step(self, action: Any) -> Any:
        self._step += 1
        ends = self._step == self._length
        reward = self._last if ends else self._reward
        observed = np.full(2, self._step / self._length, np.float32)
        return observed, reward, ends and self._terminates, ends and not self._terminates, {}


def learn(
    make: Any,
    policy_cls: type[Policy] = C51Policy,
    *,
    n_step: int = 1,
    steps: int = 600,
    model: dict[str, Any] | None = None,
    train_iter: int = 0,
) -> int:
    """Learn from random actions, and return the number of updates."""
    with Task(seed=0) as task:
        envs = make_env_manager(make, env_num=2, seed=0)
        policy = policy_cls.for_env(
            envs, seed=0, n_step=n_step, batch_size=8, priority=False,
            model={"encoder_hidden_sizes": [8], **(model or {})},
        )  # fmt: skip
        buffer = TensorBuffer(10_000, n_step=n_step)
        task.use(StepCollector(policy, envs, n_sample=100, random_steps=100))
        task.use(DataPusher(buffer)).use(OffPolicyLearner(policy, buffer))
        task.use(TerminationChecker(max_env_step=steps))
        task.ctx.train_iter = train_iter
        task.run()
        updates: int = task.ctx.train_iter
    return updates


@pytest.mark.parametrize("policy_cls", [C51Policy, RainbowPolicy])
@pytest.mark.parametrize("n_step", [1, 3])
@pytest.mark.parametrize(
    ("make", "wide"),
    [
        (lambda: Paid(1.0, 20), "v_min=0 v_max=100"),
        (lambda: Paid(-1.0, 30), "v_min=-100 v_max=0"),
        (lambda: Paid(0.0, 5, last=12.0), "v_min=0 v_max=1200"),
        (lambda: Paid(0.25, 45, last=-300.0), "v_min=-30000 v_max=25"),
        (lambda: Paid(-3.0, 200, terminates=False), "v_min=-300 v_max=0"),
    ],
)
def test_returns_beyond_the_default_range_are_refused_with_one_that_holds_them(
    policy_cls: type[Policy], n_step: int, make: Any, wide: str
) -> None:
    with pytest.raises(ConfigError, match="v_min and v_max") as caught:
        learn(make, policy_cls, n_step=n_step)
    assert wide in str(caught.value)
    limits = {name: float(value) for name, value in (one.split("=") for one in wide.split())}
    assert learn(make, policy_cls, n_step=n_step, steps=200, model=limits) > 0


@pytest.mark.parametrize(
    "make",
    [
        lambda: Paid(0.1, 200),
        lambda: Paid(0.0, 50, last=10.0),
        lambda: Paid(-1.0, 10),
        lambda: Paid(0.05, 40, last=-9.0),
        # Nothing shows that what follows is not negative.
        lambda: Paid(1.0, 15, terminates=False),
    ],
)
def test_returns_that_the_default_range_may_hold_are_learned(make: Any) -> None:
    assert learn(make) > 0


@pytest.mark.parametrize(
    ("model", "is_refused"),
    [({"v_max": 5.0}, False), ({"v_min": -50.0}, True), ({"v_min": -1.0, "v_max": 1.0}, False)],
)
def test_a_limit_that_was_set_is_taken(model: dict[str, Any], is_refused: bool) -> None:
    if is_refused:
        with pytest.raises(ConfigError, match=r"v_min=-50\.0 v_max=100"):
            learn(lambda: Paid(1.0, 20), model=model)
    else:
        assert learn(lambda: Paid(1.0, 20), model=model) > 0


def test_episodes_that_are_longer_than_the_first_batch_are_found_later() -> None:
    with pytest.raises(ConfigError, match="v_max"):
        learn(lambda: Paid(0.25, 300), steps=2000)


def test_a_run_that_is_resumed_is_not_refused_and_other_policies_are_not_asked() -> None:
    assert learn(lambda: Paid(1.0, 20), train_iter=7) > 7
    assert learn(lambda: Paid(1.0, 20), DQNPolicy) > 0
