"""Envs that kill their process after a number of steps, as a machine that fails does."""

from __future__ import annotations

import os
import signal
from typing import Any

from gymnasium.envs.classic_control import CartPoleEnv, PendulumEnv
from gymnasium.wrappers import TimeLimit

__all__ = ["KILL_AT", "cartpole", "pendulum"]

KILL_AT = "TEST_KILL_AT"
"""The variable with the steps, of all envs together, after which the process is killed."""

_steps = 0


class _CartPole(CartPoleEnv):
    def step(self, action: Any) -> Any:
        _count()
        return super().step(action)


class _Pendulum(PendulumEnv):
    def step(self, action: Any) -> Any:
        _count()
        return super().step(action)


def _count() -> None:
    global _steps
    _steps += 1
    if _steps == int(os.environ.get(KILL_AT, "0")):
        os.kill(os.getpid(), signal.SIGKILL)


def cartpole() -> Any:
    """Return CartPole with episodes of at most 100 steps."""
    return TimeLimit(_CartPole(), 100)


def pendulum() -> Any:
    """Return Pendulum with episodes of 20 steps."""
    return TimeLimit(_Pendulum(), 20)
