"""What holds for the updates of every algorithm, in the chain of its example."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from middleware import ExperimentResult, ExperimentSettings
from tests.examples.algorithms import of_algorithms

MOST_GRAPHS = 3
"""For example, of two variants of an update, or of full and of smaller minibatches."""


EVERY_ALGORITHM = pytest.mark.parametrize(
    ("example", "n_steps", "arguments"),
    [
        *of_algorithms(
            "lunarlander", 3000, "dqn", "c51", "qrdqn", "iqn", "rainbow", "discrete_sac"
        ),
        *of_algorithms("lunarlander_onpolicy", 20_000, "ppo", "a2c"),
        *of_algorithms("pendulum", 1000, "td3", "ddpg", "tqc"),
        pytest.param("pendulum_sac", 1000, {}, id="sac"),
        pytest.param("pendulum_ppo", 6000, {}, id="ppo, normalized"),
        pytest.param("cartpole_impala", 3000, {}, id="impala"),
        pytest.param("cartpole_memory_ppo", 3000, {}, id="recurrent ppo"),
        pytest.param("cartpole_memory_r2d2", 2000, {}, id="r2d2"),
        pytest.param("bitflip_her", 2000, {}, id="her"),
        *of_algorithms("two_step_game", 1000, "vdn", "qmix"),
        *of_algorithms("simple_spread", 5000, "ippo", "mappo"),
    ],
)


@pytest.fixture
def train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., ExperimentResult]:
    """Run a short version of an example."""
    monkeypatch.chdir(tmp_path)

    def run(example: str, n_steps: int, arguments: dict[str, Any]) -> ExperimentResult:
        module = importlib.import_module(f"examples.{example}")
        short = ExperimentSettings(n_fresh_episode=8)
        result: ExperimentResult = module.main(
            seed=1, exp_name="short", max_env_step=n_steps, experiment=short, **arguments
        )
        return result

    return run


@pytest.mark.compiled
@pytest.mark.slow
@EVERY_ALGORITHM
def test_an_update_is_one_graph_that_stays_valid(
    train: Callable[..., ExperimentResult],
    n_graphs: Callable[[], int],
    example: str,
    n_steps: int,
    arguments: dict[str, Any],
) -> None:
    assert train(example, n_steps, arguments).train_iter > 5
    assert 1 <= n_graphs() <= MOST_GRAPHS


@pytest.mark.slow
@EVERY_ALGORITHM
@pytest.mark.usefixtures("as_on_a_gpu")
def test_a_chain_works_with_outputs_that_are_read_late(
    train: Callable[..., ExperimentResult],
    example: str,
    n_steps: int,
    arguments: dict[str, Any],
) -> None:
    assert train(example, n_steps, arguments).train_iter > 5


@pytest.mark.usefixtures("as_on_a_gpu")
def test_an_off_policy_chain_works_with_outputs_that_are_read_late(
    train: Callable[..., ExperimentResult],
) -> None:
    assert train("pendulum_sac", 500, {}).train_iter > 5
