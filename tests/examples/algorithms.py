"""Short trainings of examples and of entries of the zoo, as parameters of tests."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import pytest

from middleware import ExperimentResult, ExperimentSettings
from middleware.programs.train import program_of, tuned_arguments

__all__ = ["PENDULUM", "POSITIONS", "SPREAD", "TEAM_RECALL", "TWO_STEPS", "of_zoo", "train_shortly"]

PENDULUM = "dmiddleware.zoo.envs:PendulumPositions-v1"
POSITIONS = "dmiddleware.zoo.envs:CartPolePositions-v1"
SPREAD = "mpe2.simple_spread_v3:parallel_env"
TWO_STEPS = "dmiddleware.zoo.envs:TwoStepGame"
TEAM_RECALL = "dmiddleware.zoo.envs:TeamRecall"
_ZOO = "zoo"


def of_zoo(env: str, n_steps: int, *algos: str, marks: Any = ()) -> list[Any]:
    """Return what :func:`train_shortly` takes, once for each algorithm."""
    return [
        pytest.param(_ZOO, n_steps, {"algo": algo, "env": env}, id=algo, marks=marks)
        for algo in algos
    ]


def train_shortly(example: str, n_steps: int, arguments: Mapping[str, object]) -> ExperimentResult:
    """Train by an example or by an entry of the zoo, in the folder ``runs/short``.

    Args:
        example: the example's name; ``"zoo"``: the entry that the arguments name.
        n_steps: env steps.
        arguments: of the example; ``{"algo": …, "env": …}`` of the zoo.
    """
    given = {
        "seed": 1,
        "exp_name": "short",
        "max_env_step": n_steps,
        "experiment": ExperimentSettings(n_fresh_episode=8),
    }
    if example == _ZOO:
        algo, env = str(arguments["algo"]), str(arguments["env"])
        return program_of(algo)(**{**tuned_arguments(algo, env), **given})
    result: ExperimentResult = importlib.import_module(f"examples.{example}").main(
        **given, **arguments
    )
    return result
