"""Adding the policy to a pool of opponents."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dmiddleware import Task
from dmiddleware.errors import ConfigError
from dmiddleware.policy import DQNPolicy
from dmiddleware.rollout import OpponentPool
from middleware import OnlineRLContext, SelfPlay


def make_policy() -> DQNPolicy:
    return DQNPolicy({"model": {"obs_shape": 2, "action_shape": 3, "encoder_hidden_sizes": [4]}})


def test_versions_are_added_at_an_interval_of_updates() -> None:
    policy, pool = make_policy(), OpponentPool(make_policy, size=9)
    sizes = []

    def learn(ctx: Any) -> None:
        ctx.train_iter += 4
        sizes.append(len(pool))

    with Task(OnlineRLContext(), seed=0) as task:
        task.use(SelfPlay(policy, pool, every_train_iter=10)).use(learn)
        task.run(max_step=7)
    # Updates before each step: 0, 4, 8, 12, 16, 20, 24.
    assert sizes == [1, 1, 1, 2, 2, 3, 3]


def test_a_snapshot_has_the_pool() -> None:
    first, second = (OpponentPool(make_policy, size=3) for _ in range(2))
    ours, theirs = (SelfPlay(make_policy(), one, every_train_iter=5) for one in (first, second))
    first.add(make_policy())
    theirs.load_state_dict(ours.state_dict())
    assert len(second) == 2
    for one, other in zip(
        first.state_dict()["versions"], second.state_dict()["versions"], strict=True
    ):
        for name, tensor in one["model"].items():
            assert torch.equal(tensor, other["model"][name])


def test_what_is_not_a_pool_is_refused() -> None:
    with pytest.raises(ConfigError, match="OpponentPool"):
        SelfPlay(make_policy(), [], every_train_iter=5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="every_train_iter"):
        SelfPlay(make_policy(), OpponentPool(make_policy), every_train_iter=0)
