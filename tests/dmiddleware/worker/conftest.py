"""Fixtures for tests that act in envs."""

import pytest

from tests.dmiddleware.counting_fixtures import (
    batched_policy,
    counting_envs,
    dqn_policy,
    lockstep_envs,
    per_env_policy,
)

__all__ = ["counting_envs", "lockstep_envs", "batched_policy", "per_env_policy", "dqn_policy"]


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path, monkeypatch):
    """Run in an empty folder, where workers without ``exp_name`` write their logs."""
    monkeypatch.chdir(tmp_path)
