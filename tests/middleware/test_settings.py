"""The settings of the stock middleware, which a run saves in its config."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import middleware
import middleware.classic
from dmiddleware.data import PrioritySampler, TensorBuffer, as_tree, save_dataset
from dmiddleware.env import make_env_manager
from dmiddleware.files.offline_dataset import OfflineDataset
from dmiddleware.policy import DQNPolicy
from dmiddleware.reward import GAIL, IntrinsicCritic
from dmiddleware.rollout import OpponentPool, make_game
from dmiddleware.settings import plain_values
from middleware import RunFolder
from tests.dmiddleware.team_games import Solo

NOT_SETTINGS = {
    "policy", "env_manager", "buffer", "run", "parts", "learner", "dataset", "priority_fn",
    "console", "period", "model", "pool", "critic", "rule", "env_managers", "game",
    "players",
}  # fmt: skip
"""Arguments that are objects, or where files go; ``period`` is another name."""

STOCK = {
    name
    for name in middleware.__all__
    if inspect.isclass(kind := getattr(middleware, name))
    and issubclass(kind, middleware.BaseMiddleware)
} - {"BaseMiddleware", "GAEEstimator", "gae_estimator", "OnPolicyLearner"}
"""All that have arguments which this policy and these envs fit."""


@pytest.fixture
def arguments(tmp_path: Path) -> Iterator[dict[str, Any]]:
    envs = make_env_manager("CartPole-v1", env_num=2, seed=0)
    policy = DQNPolicy.for_env(envs, seed=0, batch_size=2)
    game = make_game(Solo, teams={"only": "it"}, env_num=2)
    path = tmp_path / "data.safetensors"
    expert = as_tree({"obs": torch.zeros(4, 4), "action": torch.zeros(4, dtype=torch.int64)})
    save_dataset(path, {"obs": torch.zeros(4, 4), "done": torch.zeros(4, dtype=torch.bool)})
    with OfflineDataset(path) as dataset, RunFolder.create("run", root=tmp_path) as run:
        yield {
            "policy": policy,
            "env_manager": envs,
            "env_managers": [envs],
            "game": game,
            "players": {"only": policy},
            "rule": lambda ctx, now: None,
            "buffer": TensorBuffer(100, sampler=PrioritySampler(alpha=0.5)),
            "run": run,
            "dataset": dataset,
            "model": GAIL.for_env(envs, expert),
            "critic": IntrinsicCritic((4,)),
            "pool": OpponentPool(lambda: DQNPolicy.for_env(envs, seed=0), size=2),
            "every_train_iter": 5,
            "path": path,
            "name": "tried",
            "root": tmp_path,
            "batch_size": 2,
            "n_episode": 2,
            "n_sample": 4,
            "period": 5,
            "max_env_step": 100,
            "priority_fn": abs,
        }


FETCHERS = {"offpolicy_data_fetcher", "OfflineDataFetcher", "offline_data_fetcher"}


@pytest.mark.parametrize("name", sorted(STOCK | FETCHERS))
def test_settings_have_every_plain_argument_of_a_middleware(
    name: str, arguments: dict[str, Any]
) -> None:
    factory = getattr(middleware.classic if name in FETCHERS else middleware, name)
    parameters = set(inspect.signature(factory).parameters)
    built = factory(**{key: value for key, value in arguments.items() if key in parameters})
    expected = parameters - NOT_SETTINGS - ({"name"} if name == "Experiment" else set())
    settings = plain_values({**plain_values(built.settings), **built.components})
    assert expected <= set(settings)
    given = {key: plain_values(arguments[key]) for key in expected & set(arguments)}
    assert {key: settings[key] for key in given} == given


def test_settings_of_a_buffer_have_those_of_its_sampler() -> None:
    settings = TensorBuffer(100, n_step=3, sampler=PrioritySampler(alpha=0.5)).settings
    assert settings["type"] == "TensorBuffer"
    assert (settings["size"], settings["n_step"]) == (100, 3)
    assert settings["sampler"] == {
        "type": "PrioritySampler", "alpha": 0.5, "beta": 0.4, "eps": 1e-6
    }  # fmt: skip
