"""An example in four processes: the same program, one folder, one final line."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from dmiddleware.data import load_checkpoint
from tests.dmiddleware.launch.ditask_process import DITASK
from tests.examples.algorithms import POSITIONS, SPREAD, TEAM_RECALL, TWO_STEPS, of_zoo

ROOT = Path(__file__).parents[2]
# Enough for each to collect, learn and evaluate. With torch imported here, ditask loads it once and
# not in each node.
PROGRAM = """
import json

import torch

from tests.examples.algorithms import train_shortly

def main():
    result = train_shortly(*json.loads(open("given").read()))
    if result.mean_return == result.mean_return:
        print("judged", flush=True)
"""


def run_example(
    folder: Path, example: str, n_steps: int, *options: str, **arguments: object
) -> str:
    """Train shortly with ditask, and return what it prints."""
    (folder / "given").write_text(json.dumps([example, n_steps, arguments]))
    (folder / "short.py").write_text(PROGRAM)
    done = subprocess.run(
        [*DITASK, "--main", "short.main", *options],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(folder)},
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


SLOW = pytest.mark.slow


@pytest.mark.process
@pytest.mark.parametrize(
    ("example", "n_steps", "arguments"),
    [
        ("cartpole_dqn", 2000, {}),
        pytest.param("cartpole_dqn_per_nstep", 2000, {}, marks=SLOW),
        pytest.param("cartpole_ppo", 2000, {}, marks=SLOW),
        *of_zoo("Pendulum-v1", 4000, "ppo", marks=SLOW),
        *of_zoo("CartPole-v1", 2000, "a2c", marks=SLOW),
        *of_zoo("CartPole-v1", 8000, "impala", marks=SLOW),
        # An episode is 500 steps at first, in each of 16 envs.
        *of_zoo("Acrobot-v1", 10_000, "dqn", marks=SLOW),
    ],
)
def test_it_trains_in_four_processes(
    tmp_path: Path, example: str, n_steps: int, arguments: dict[str, object]
) -> None:
    text = run_example(tmp_path, example, n_steps, "--parallel-workers", "4", **arguments)
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["short"]
    folder = tmp_path / "runs" / "short"
    found = {path.name for path in folder.iterdir()}
    assert {"ckpt", "tb", "config.yaml", "curve.png", "final_ctx.json", "log.txt"} <= found
    assert {path.name for path in (folder / "tb").iterdir() if path.is_dir()} == {
        f"node-{number}" for number in (1, 2, 3)
    }
    (last,) = re.findall(
        r"^\[node (\d)\] mean return -?[\d.]+ over \d+ fresh episodes of the best policy, after "
        r"([\d,]+) env steps and ([\d,]+) updates in [\d.]+ s; files in runs/short/$",
        text,
        re.MULTILINE,
    )
    assert last[0] == "0"
    assert int(last[1].replace(",", "")) >= n_steps
    assert re.findall(r"^\[node (\d)\] judged$", text, re.MULTILINE) == ["0"]
    assert set(re.findall(r"^\[node (\d)\] step ", text, re.MULTILINE)) <= {"0"}
    # Where episodes are long, the run may have ended before the first evaluation had.
    is_short = example.startswith("cartpole") or arguments["env"] == "CartPole-v1"
    name = "best" if is_short else "final"
    best = load_checkpoint(folder / "ckpt" / f"{name}.safetensors")
    assert 0 <= best["last_iter"] <= int(last[2].replace(",", ""))
    assert not [path for path in tmp_path.iterdir() if path.name.startswith("ditask-")]


SUMMARY = re.compile(
    r"mean return -?[\d.]+ over \d+ fresh episodes .* after ([\d,]+) env steps and"
)


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize(
    ("example", "n_steps", "arguments"),
    [
        *of_zoo("LunarLander-v3", 4000, "dqn", "c51", "qrdqn", "iqn", "rainbow", "discrete_sac"),
        *of_zoo("Pendulum-v1", 1500, "sac", "td3", "ddpg", "tqc"),
        *of_zoo(POSITIONS, 4000, "ppo_recurrent"),
        *of_zoo(POSITIONS, 3000, "r2d2"),
        pytest.param("pendulum_gail", 5000, {}, id="gail"),
        *(pytest.param("doorkey_rnd", 5000, {"algo": algo}, id=algo) for algo in ("rnd", "icm")),
        pytest.param("bitflip_her", 3000, {}, id="her"),
        *of_zoo(TWO_STEPS, 2000, "vdn", "qmix"),
        *of_zoo(TEAM_RECALL, 3000, "qmix_recurrent"),
        *of_zoo(SPREAD, 7000, "ippo", "mappo"),
        *of_zoo(TEAM_RECALL, 4000, "mappo_recurrent"),
        pytest.param("tictactoe_self_play", 3000, {}, id="self-play"),
    ],
)
def test_each_algorithm_trains_in_three_processes(
    tmp_path: Path, example: str, n_steps: int, arguments: dict[str, object]
) -> None:
    text = run_example(tmp_path, example, n_steps, "--parallel-workers", "3", **arguments)
    (env_step,) = SUMMARY.findall(text)
    assert int(env_step.replace(",", "")) >= n_steps


@pytest.mark.slow
@pytest.mark.process
def test_the_first_example_trains_with_two_learners(tmp_path: Path) -> None:
    roles = "learner=2,collector=2,evaluator=1"
    text = run_example(tmp_path, "cartpole_dqn", 3000, "--roles", roles)
    folder = tmp_path / "runs" / "short"
    found = {path.name for path in folder.iterdir()}
    assert {"log.txt", *(f"log.node-{number}.txt" for number in (1, 2, 3, 4))} <= found
    # Rank 1 logs no metrics.
    assert {path.name for path in (folder / "tb").iterdir() if path.is_dir()} == {
        f"node-{number}" for number in (2, 3, 4)
    }
    assert re.findall(r"^\[node (\d)\] judged$", text, re.MULTILINE) == ["0"]
    (env_step,) = SUMMARY.findall(text)
    assert int(env_step.replace(",", "")) >= 3000
