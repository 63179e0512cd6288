"""The fixtures of tests that act in envs."""

import pytest

from tests.dmiddleware.counting_fixtures import (
    batched_policy,
    counting_envs,
    dqn_policy,
    lockstep_envs,
    per_env_policy,
)

__all__ = [
    "counting_envs",
    "lockstep_envs",
    "batched_policy",
    "per_env_policy",
    "dqn_policy",
    "warm",
]


@pytest.fixture(autouse=True)
def warm(warm_processes: None) -> None:
    """Fork the processes of these tests."""
