"""The fixtures of tests that act in envs."""

from tests.dmiddleware.telling_envs import (
    batched_policy,
    dqn_policy,
    lockstep_envs,
    per_env_policy,
    telling_envs,
)

__all__ = ["telling_envs", "lockstep_envs", "batched_policy", "per_env_policy", "dqn_policy"]
