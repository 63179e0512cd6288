"""Rows for tests of offline data: a collector of them, and a dataset."""

from pathlib import Path

import torch

from dmiddleware.data import as_tree, save_dataset
from dmiddleware.env import make_env_manager
from dmiddleware.policy import DQNPolicy
from middleware.collect import StepCollector

MODEL = {"obs_shape": 4, "action_shape": 2, "encoder_hidden_sizes": [8]}


def collector_of_two() -> StepCollector:
    """Return a collector of 10 rows of CartPole in each step, from two envs."""
    policy = DQNPolicy({"seed": 0, "model": MODEL})
    envs = make_env_manager("CartPole-v1", env_num=2, seed=0)
    return StepCollector(policy.collect_mode, envs, n_sample=10)


def ten_rows(folder: Path) -> Path:
    """Write a dataset of ten rows, which the column ``row`` numbers."""
    path = folder / "rows.safetensors"
    draw = torch.Generator().manual_seed(0)
    rows = {
        "row": torch.arange(10),
        "obs": torch.randn(10, 4, generator=draw),
        "action": torch.randint(2, (10,), generator=draw),
        "done": torch.zeros(10, dtype=torch.bool),
    }
    save_dataset(path, as_tree(rows))
    return path
