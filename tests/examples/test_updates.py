"""What holds for the updates of every algorithm, in its tuned chain."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.examples.algorithms import (
    PENDULUM,
    POSITIONS,
    SPREAD,
    TEAM_RECALL,
    TWO_STEPS,
    of_zoo,
    train_shortly,
)

MOST_GRAPHS = 3
"""For example, of two variants of an update, or of full and of smaller minibatches."""


EVERY_ALGORITHM = pytest.mark.parametrize(
    ("example", "n_steps", "arguments"),
    [
        *of_zoo("LunarLander-v3", 3000, "dqn", "c51", "qrdqn", "iqn", "rainbow", "discrete_sac"),
        *of_zoo("CartPole-v1", 1500, "sql", "mdqn", "fqf"),
        *of_zoo("LunarLander-v3", 20_000, "ppo", "a2c"),
        *of_zoo("Pendulum-v1", 1000, "sac", "td3", "ddpg", "d4pg", "tqc", "crossq", "fasttd3"),
        *of_zoo("Pendulum-v1", 6000, "ppo"),
        *of_zoo("CartPole-v1", 3000, "impala", "ppg_offpolicy"),
        *of_zoo("CartPole-v1", 10_000, "ppg"),
        *of_zoo("CartPole-v1", 5000, "pqn"),
        *of_zoo(POSITIONS, 3000, "ppo_recurrent"),
        *of_zoo(POSITIONS, 2000, "r2d2"),
        *of_zoo(PENDULUM, 1000, "sac_recurrent"),
        pytest.param("bitflip_her", 2000, {}, id="her"),
        *of_zoo(TWO_STEPS, 1000, "vdn", "qmix", "wqmix"),
        *of_zoo(TEAM_RECALL, 1000, "qmix_recurrent"),
        *of_zoo(TEAM_RECALL, 3000, "mappo_recurrent"),
        *of_zoo(SPREAD, 5000, "ippo", "mappo"),
    ],
)


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.compiled
@pytest.mark.slow
@EVERY_ALGORITHM
def test_an_update_is_one_graph_that_stays_valid(
    n_graphs: Callable[[], int],
    example: str,
    n_steps: int,
    arguments: dict[str, Any],
) -> None:
    assert train_shortly(example, n_steps, arguments).train_iter > 5
    assert 1 <= n_graphs() <= MOST_GRAPHS


@pytest.mark.slow
@EVERY_ALGORITHM
@pytest.mark.usefixtures("as_on_a_gpu")
def test_a_chain_works_with_outputs_that_are_read_late(
    example: str,
    n_steps: int,
    arguments: dict[str, Any],
) -> None:
    assert train_shortly(example, n_steps, arguments).train_iter > 5


@pytest.mark.usefixtures("as_on_a_gpu")
def test_an_off_policy_chain_works_with_outputs_that_are_read_late() -> None:
    arguments = {"algo": "sac", "env": "Pendulum-v1"}
    assert train_shortly("zoo", 320, arguments).train_iter > 5
