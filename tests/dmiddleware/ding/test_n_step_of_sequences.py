"""The n-step rewards of sequences."""

from collections.abc import Iterator

import pytest
import torch
from easydict import EasyDict

import dmiddleware.ding as door
from dmiddleware.tree import as_tree
from middleware import OnlineRLContext


@pytest.fixture(autouse=True)
def opened() -> Iterator[None]:
    door.open_door()
    yield
    door.close_door()


@pytest.mark.parametrize("learns_sequences", [False, True])
def test_a_policy_that_learns_sequences_sums_rewards_itself(learns_sequences):
    from ding.framework.middleware import nstep_reward_enhancer

    policy = {"nstep": 2, "discount_factor": 0.5}
    if learns_sequences:
        policy["burnin_step"] = 2
    ctx = OnlineRLContext()
    flags = torch.zeros(3, 1, dtype=torch.bool)
    ctx.trajectories = as_tree(
        {
            "obs": torch.arange(3.0).view(3, 1),
            "next_obs": torch.arange(1.0, 4.0).view(3, 1),
            "reward": torch.ones(3, 1),
            "done": flags,
            "terminated": flags,
            "episode_id": torch.zeros(3, 1, dtype=torch.int64),
        }
    )
    nstep_reward_enhancer(EasyDict(policy=policy))(ctx)
    summed = [1.0, 1.0, 1.0] if learns_sequences else [1.5, 1.5, 1.0]
    assert ctx.trajectories["reward"][:, 0].tolist() == summed
    after = [1.0, 2.0, 3.0] if learns_sequences else [2.0, 3.0, 3.0]
    assert ctx.trajectories["next_obs"][:, 0].tolist() == after
