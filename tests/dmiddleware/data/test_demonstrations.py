"""Demonstrations in the samples of a replay buffer."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dmiddleware.data import DemonstrationReplay, PrioritySampler, TensorBuffer, as_tree
from dmiddleware.errors import ConfigError, StructureError
from dmiddleware.policy import SQLPolicy
from dmiddleware.tree import Batch


def rows(n: int, mark: float, **columns: Any) -> Batch:
    """Return an episode of rows whose observations are a mark."""
    obs = torch.full((n, 2), mark)
    return as_tree(
        {
            "obs": obs,
            "next_obs": obs,
            "action": torch.arange(n) % 2,
            "reward": torch.full((n,), 7.0),
            "terminated": torch.arange(n) == n - 1,
            "truncated": torch.zeros(n, dtype=torch.bool),
            "done": torch.arange(n) == n - 1,
            "episode_id": torch.zeros(n, dtype=torch.int64),
            **columns,
        }
    )


def mixed(shown: DemonstrationReplay, **options: Any) -> TensorBuffer:
    buffer = TensorBuffer(100, transform=shown, seed=0, **options)
    buffer.push(rows(50, 0.0))
    return buffer


@pytest.mark.parametrize(("share", "n_shown"), [(0.5, 8), (0.25, 4), (0.01, 1)])
def test_a_share_of_each_sample_are_demonstrations(share: float, n_shown: int) -> None:
    sample = mixed(DemonstrationReplay(rows(20, 1.0), share=share)).sample(16)
    assert sample["is_expert"].sum() == n_shown
    assert torch.equal(sample["obs"][:, 0], sample["is_expert"].float())
    assert (sample["reward"] == 7.0).all()


def test_only_demonstrations_have_a_reward_in_sqil() -> None:
    sample = mixed(DemonstrationReplay(rows(20, 1.0), reward="sqil")).sample(16)
    assert torch.equal(sample["reward"], sample["is_expert"].float())


def test_demonstrations_have_the_n_step_returns_of_the_policy() -> None:
    buffer = TensorBuffer(100, transform=DemonstrationReplay(rows(20, 1.0), reward="sqil"), seed=0)
    buffer.bind(n_step=3, discount=0.5)
    buffer.push(rows(50, 0.0))
    sample = buffer.sample(40)
    shown = sample["is_expert"]
    assert set(sample["reward"][shown].tolist()) <= {1.0, 1.5, 1.75}
    assert 1.75 in sample["reward"][shown].tolist()
    assert (sample["reward"][~shown] == 0.0).all()
    by_reward = {1.0: 0.5, 1.5: 0.25, 1.75: 0.125}
    wanted = [by_reward[reward] for reward in sample["reward"][shown].tolist()]
    assert sample["discount"][shown].tolist() == wanted


def test_draws_of_demonstrations_are_part_of_the_state_of_the_buffer() -> None:
    buffer = mixed(DemonstrationReplay(rows(20, 1.0, obs=torch.rand(20, 2))))
    buffer.sample(8)
    state = buffer.state_dict()
    drawn = buffer.sample(8)["obs"]
    buffer.load_state_dict(state)
    assert torch.equal(buffer.sample(8)["obs"], drawn)


def test_columns_that_demonstrations_lack_are_left_out() -> None:
    buffer = TensorBuffer(100, transform=DemonstrationReplay(rows(20, 1.0)), seed=0)
    buffer.push(rows(50, 0.0, logit=torch.zeros(50, 2)))
    assert "logit" not in buffer.sample(8)


def test_what_cannot_work_is_refused() -> None:
    with pytest.raises(StructureError, match="next_obs"):
        DemonstrationReplay(as_tree({"obs": torch.zeros(3, 2), "action": torch.zeros(3)}))
    with pytest.raises(ConfigError, match="share"):
        DemonstrationReplay(rows(20, 1.0), share=1.0)
    shown = DemonstrationReplay(rows(20, 1.0))
    with pytest.raises(ConfigError, match="PrioritySampler"):
        TensorBuffer(100, transform=shown, sampler=PrioritySampler())
    with pytest.raises(ConfigError, match="unroll_len=4"):
        TensorBuffer(100, transform=shown, unroll_len=4)
    with pytest.raises(ConfigError, match="20"):
        mixed(shown).sample(50)
    with pytest.raises(StructureError, match="obs"):
        mixed(DemonstrationReplay(rows(20, 1.0, obs=torch.zeros(20, 3)))).sample(8)


def test_a_policy_learns_what_is_shown() -> None:
    """The expert always takes action 1, and the policy took both."""
    policy = SQLPolicy(
        {"model": {"obs_shape": 2, "action_shape": 2, "encoder_hidden_sizes": [8]}, "seed": 0,
         "learning_rate": 0.01, "target_update_freq": 10, "discount": 0.9}
    )  # fmt: skip
    shown = rows(20, 0.0, action=torch.ones(20, dtype=torch.int64))
    buffer = mixed(DemonstrationReplay(shown, reward="sqil"))
    for _ in range(150):
        policy.learn_mode.forward(buffer.sample(32))
    drawn = policy.collect_mode.forward(torch.zeros(200, 2))["action"]
    assert drawn.float().mean() > 0.9
