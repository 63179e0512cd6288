"""Generative adversarial imitation learning."""

from __future__ import annotations

from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces

from dmiddleware.data import Batch, as_tree
from dmiddleware.errors import NotEnoughData, SpaceError, StructureError
from dmiddleware.reward import GAIL, Discriminator


class Spaces(NamedTuple):
    observation_space: gym.Space[Any]
    action_space: gym.Space[Any]


CARTPOLE = Spaces(spaces.Box(-np.inf, np.inf, (4,)), spaces.Discrete(2))


def rows(n: int, seed: int, *, follows: float) -> Batch:
    """Rows whose action is the sign of the first entry of obs, with a probability."""
    generator = torch.Generator().manual_seed(seed)
    obs = torch.randn(n, 4, generator=generator)
    right = torch.rand(n, generator=generator) < follows
    action = ((obs[:, 0] > 0) == right).long()
    return as_tree({"obs": obs, "action": action, "done": torch.zeros(n, dtype=torch.bool)})


def made(expert: Batch, **options: Any) -> GAIL:
    return GAIL.for_env(CARTPOLE, expert, **{"batch_size": 64, **options})


def test_reward_and_loss_are_those_of_the_paper() -> None:
    expert = as_tree({"obs": torch.ones(1, 4), "action": torch.ones(1, dtype=torch.int64)})
    gail, batch = made(expert), rows(64, 0, follows=0.5)
    network = gail.components["discriminator"].module
    with torch.no_grad():
        policy = network(batch["obs"], batch["action"]).sigmoid()
        of_expert = network(expert["obs"], expert["action"]).sigmoid()
    torch.testing.assert_close(gail.reward(batch), -policy.log())
    wanted = -policy.log().mean() - (1 - of_expert).log()
    assert gail.update(batch)["discriminator_loss"] == pytest.approx(wanted.item(), rel=1e-5)


@pytest.mark.learning
def test_the_reward_of_what_the_expert_does_becomes_higher() -> None:
    gail = made(rows(500, 0, follows=1.0), learning_rate=3e-3, epochs=4)
    for seed in range(1, 25):
        output = gail.update(rows(256, seed, follows=0.5))
    assert output["expert_accuracy"] > 0.8
    alike, unlike = (gail.reward(rows(500, 99, follows=p)).mean() for p in (1.0, 0.0))
    assert alike > 3 * unlike


def test_the_seed_decides_on_the_first_weights_and_the_order() -> None:
    expert, batch = rows(50, 0, follows=1.0), rows(64, 1, follows=0.5)
    outputs = [made(expert, seed=seed).update(batch) for seed in (1, 1, 2)]
    assert outputs[0] == outputs[1] != outputs[2]


@pytest.mark.parametrize(
    "space",
    [spaces.MultiDiscrete([2, 3]), spaces.MultiBinary(2), spaces.Box(-2.0, 2.0, (2,)), None],
    ids=["multi discrete", "multi binary", "box", "dict"],
)
def test_all_kinds_of_actions_and_nested_observations_are_judged(
    space: gym.Space[Any] | None,
) -> None:
    several = spaces.Dict({"a": spaces.Discrete(2), "b": spaces.Box(-1.0, 1.0, (1,))})
    action_space = several if space is None else space
    obs_space = spaces.Dict({"x": spaces.Box(-1.0, 1.0, (2,)), "y": spaces.Discrete(3)})
    network = Discriminator(obs_space, action_space)
    obs = as_tree({"x": torch.zeros(6, 2), "y": torch.zeros(6, dtype=torch.int64)})
    sample = {
        "multi discrete": torch.zeros(6, 2, dtype=torch.int64),
        "dict": as_tree({"a": torch.zeros(6, dtype=torch.int64), "b": torch.zeros(6, 1)}),
    }
    action = sample["dict" if space is None else "multi discrete"]
    if isinstance(space, spaces.Box):
        action = torch.zeros(6, 2)
    assert network(obs, action).shape == (6,)


def test_small_images_are_judged_through_small_convolutions() -> None:
    grid = Spaces(spaces.Box(0, 255, (3, 7, 7), np.uint8), spaces.Discrete(2))
    rows = as_tree(
        {
            "obs": torch.randint(256, (6, 3, 7, 7), dtype=torch.uint8),
            "action": torch.zeros(6, dtype=torch.int64),
            "done": torch.zeros(6, dtype=torch.bool),
        }
    )
    gail = GAIL.for_env(grid, rows, conv_layers=((4, 3, 2),))
    gail.update(rows)
    assert gail.reward(rows).shape == (6,)
    with pytest.raises(SpaceError, match="at least 36 by 36"):
        GAIL.for_env(grid, rows)


def test_lanes_of_the_expert_are_flattened() -> None:
    lanes = as_tree(
        {
            "obs": torch.zeros(5, 2, 4),
            "action": torch.zeros(5, 2, dtype=torch.int64),
            "done": torch.zeros(5, 2, dtype=torch.bool),
        }
    )
    assert made(lanes).settings["n_expert"] == 10


def test_an_expert_without_actions_or_rows_is_refused() -> None:
    with pytest.raises(StructureError, match="lack the column action"):
        made(as_tree({"obs": torch.zeros(3, 4)}))
    with pytest.raises(NotEnoughData, match="at least one episode"):
        made(as_tree({"obs": torch.zeros(0, 4), "action": torch.zeros(0, dtype=torch.int64)}))
