"""The training setup that all sides of the collecting and learning benchmarks share.

DQN on CartPole-v1: 8 environments stepped one after another, a Q-network with hidden layers of 128,
128 and 64, 5 updates of 64 rows after each step of all environments, Adam, smooth L1 loss, no
gradient clipping, a hard target update every 500 updates, a constant exploration rate.
"""

from __future__ import annotations

from typing import Any

import gymnasium as gym

ENV_NUM = 8
HIDDEN_SIZES = (128, 128, 64)
BATCH_SIZE = 64
UPDATES_PER_STEP = 5
BUFFER_SIZE = 20_000
FILL_STEPS = 250  # of all environments, before anything is timed: 2,000 rows
TARGET_UPDATE = 500  # in updates
EPSILON = 0.1
DISCOUNT = 0.99
LEARNING_RATE = 1e-3
OBS_SIZE = 4
ACTION_NUM = 2


def make_env() -> gym.Env[Any, Any]:
    """Make one environment, the same for every side."""
    return gym.make("CartPole-v1", disable_env_checker=True)
