"""What the hooks of DI-engine's policies learn from."""

import pytest
import torch

from dmiddleware.classic.learn_inputs import default_preprocess_learn
from dmiddleware.errors import ConfigError


def samples(**columns):
    return [
        {
            "obs": torch.full((4,), float(row)),
            "action": torch.tensor([row]),
            "reward": torch.arange(3.0) + row,
            "done": row == 1,
            **{name: column[row] for name, column in columns.items()},
        }
        for row in range(2)
    ]


def test_samples_become_columns_with_the_steps_of_rewards_first():
    batch = default_preprocess_learn(samples(), use_nstep=True)
    assert batch["reward"].tolist() == [[0.0, 1.0], [1.0, 2.0], [2.0, 3.0]]
    assert batch["action"].tolist() == [0, 1]
    assert batch["done"].tolist() == [0.0, 1.0]
    assert batch["weight"] is None
    assert batch["obs"].shape == (2, 4)


def test_one_reward_per_sample_becomes_one_step():
    rows = samples(reward=[torch.tensor([2.0]), torch.tensor([3.0])])
    assert default_preprocess_learn(rows, use_nstep=True)["reward"].tolist() == [[2.0, 3.0]]
    assert default_preprocess_learn(rows)["reward"].tolist() == [2.0, 3.0]
    assert default_preprocess_learn(rows, ignore_done=True)["done"].tolist() == [0.0, 0.0]


def test_importance_weights_have_either_name_and_need_priorities():
    rows = samples(IS=[0.5, 1.0])
    options = {"use_priority": True, "use_priority_IS_weight": True}
    assert default_preprocess_learn(rows, **options)["weight"].tolist() == [0.5, 1.0]
    with pytest.raises(ConfigError, match="use_priority"):
        default_preprocess_learn(rows, use_priority_IS_weight=True)
    with pytest.raises(ConfigError, match="importance weight"):
        default_preprocess_learn(samples(), **options)
