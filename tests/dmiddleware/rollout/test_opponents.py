"""Past versions of a policy as opponents."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

from dmiddleware.env import OpponentEnv, make_env_manager
from dmiddleware.errors import CheckpointMismatch, ConfigError
from dmiddleware.policy import DQNPolicy, PPOPolicy
from dmiddleware.rollout import OpponentPool, RolloutCollector
from tests.dmiddleware.env.test_opponent_env import Counting, tictactoe

MODEL = {"obs_shape": 2, "action_shape": 3, "encoder_hidden_sizes": [4]}


def policy_that_takes(action: int) -> DQNPolicy:
    policy = make_policy()
    head = policy.model.head[0]
    with torch.no_grad():
        head.weight.zero_()
        head.bias.copy_(torch.eye(3)[action])
    return policy


def make_policy() -> DQNPolicy:
    return DQNPolicy({"model": MODEL, "seed": 0})


def actions_of(pool: OpponentPool, n: int = 300, mask: Any = None) -> Counter[int]:
    rng = np.random.default_rng(0)
    obs = np.zeros(2, np.float32)
    return Counter(int(pool.act(pool.draw(rng), obs, mask, rng)) for _ in range(n))


def test_versions_are_drawn_uniformly_and_the_oldest_is_dropped() -> None:
    pool = OpponentPool(make_policy, size=2)
    learner = policy_that_takes(0)
    pool.add(learner)
    assert actions_of(pool, 5) == {0: 5}
    learner.collect_mode.load_state_dict(policy_that_takes(1).collect_mode.state_dict())
    assert actions_of(pool, 5) == {0: 5}, "a version does not follow the policy"
    pool.add(learner)
    counts = actions_of(pool)
    assert set(counts) == {0, 1}
    assert min(counts.values()) > 110
    pool.add(policy_that_takes(2))
    assert len(pool) == 2
    assert set(actions_of(pool)) == {1, 2}


def test_masks_that_are_not_in_observations_are_respected() -> None:
    pool = OpponentPool(make_policy)
    pool.add(policy_that_takes(1))
    assert actions_of(pool, 5, np.array([1, 0, 0])) == {0: 5}
    pool = OpponentPool(make_policy, policy_kwargs={"eps": 1.0})
    pool.add(policy_that_takes(1))
    assert set(actions_of(pool, 50, np.array([1, 0, 1]))) == {0, 2}


def test_a_pool_is_saved_with_all_versions() -> None:
    pool, other = OpponentPool(make_policy, size=3), OpponentPool(make_policy, size=3)
    for action in (0, 1, 2, 2):
        pool.add(policy_that_takes(action))
    other.load_state_dict(pool.state_dict())
    assert actions_of(other) == actions_of(pool)
    for one in (pool, other):
        one.add(policy_that_takes(0))  # in the place of the oldest
    assert actions_of(other) == actions_of(pool)
    with pytest.raises(CheckpointMismatch, match="3 opponents"):
        OpponentPool(make_policy, size=2).load_state_dict(pool.state_dict())


@pytest.mark.parametrize("cls", [DQNPolicy, PPOPolicy])
def test_policies_play_against_their_versions(cls: Any) -> None:
    def make() -> Any:
        return cls.for_env(OpponentEnv(tictactoe()), seed=0)

    policy, pool = make(), OpponentPool(make)
    pool.add(policy)
    with make_env_manager(lambda: OpponentEnv(tictactoe(), pool), env_num=4, seed=0) as envs:
        rows = RolloutCollector(policy, envs).collect(80)
    assert rows["done"].any()
    assert set(rows["reward"].unique().tolist()) <= {-1.0, 0.0, 1.0}


def test_an_opponent_plays_in_a_game_of_its_own() -> None:
    pool = OpponentPool(make_policy)
    pool.add(policy_that_takes(2))
    env = OpponentEnv(Counting(), pool, seat=0)
    env.reset(seed=0)
    assert env.step(0)[0].tolist() == [4.0, 0.0]


def test_an_empty_pool_and_an_invalid_size_are_refused() -> None:
    with pytest.raises(ConfigError, match="is empty"):
        OpponentPool(make_policy).draw(np.random.default_rng(0))
    with pytest.raises(ConfigError, match="size must be an integer ≥ 1"):
        OpponentPool(make_policy, size=0)
