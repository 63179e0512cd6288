"""PPO trains on an environment of each extra."""

from __future__ import annotations

import functools
import importlib.util
import os
from pathlib import Path

import pytest

from dmiddleware.program import run_program
from middleware import Experiment

MODULES = {
    "atari": "ale_py",
    "box2d": "Box2D",
    "envpool": "envpool",
    "minigrid": "minigrid",
    "mujoco": "mujoco",
    "robotics": "gymnasium_robotics",
}


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    "extra", [pytest.param(x, marks=pytest.mark.slow) if x == "atari" else x for x in MODULES]
)
def test_the_environment_of_an_extra_can_be_trained_on(
    extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "CI" not in os.environ and importlib.util.find_spec(MODULES[extra]) is None:
        pytest.skip(f"needs the package {MODULES[extra]}")
    from examples import environments as example

    assert set(example.FAMILIES) == set(MODULES)
    short = functools.partial(Experiment, n_fresh_episode=1)
    monkeypatch.setattr(example, "Experiment", short)
    # The games of Pong are long, and the evaluation plays whole ones.
    monkeypatch.setattr(example, "InteractionEvaluator", lambda *args, **at: lambda ctx: None)
    family = example.FAMILIES[extra]
    monkeypatch.setitem(
        example.FAMILIES, extra, example.Family(family.train, policy=family.policy, n_sample=64)
    )
    run_program(example.main, ["--extra", extra, "--max-env-step", "128"])
    assert list(Path().rglob("*.safetensors"))
