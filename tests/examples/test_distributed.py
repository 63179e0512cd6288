"""An example in four processes: the same program, one folder, one final line."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from dmiddleware.data import load_checkpoint
from tests.dmiddleware.launch.ditask_process import DITASK

ROOT = Path(__file__).parents[2]
# Enough for each to collect, learn and evaluate.
PROGRAM = """
import importlib

import functools

from middleware import Experiment

example = importlib.import_module("examples." + open("example").read())
example.Experiment = functools.partial(Experiment, n_fresh_episode=8)

def main():
    result = example.main(seed=1, exp_name="short", max_env_step=int(open("steps").read()))
    if result.mean_return == result.mean_return:
        print("judged", flush=True)
"""


@pytest.mark.process
@pytest.mark.parametrize(
    ("example", "n_steps"),
    [
        ("cartpole_dqn", 2000),
        pytest.param("cartpole_dqn_per_nstep", 2000, marks=pytest.mark.slow),
        pytest.param("cartpole_ppo", 2000, marks=pytest.mark.slow),
        pytest.param("pendulum_ppo", 4000, marks=pytest.mark.slow),
        # An episode is 500 steps at first, in each of 16 envs.
        pytest.param("acrobot_dqn", 10_000, marks=pytest.mark.slow),
    ],
)
def test_example_trains_in_four_processes(tmp_path: Path, example: str, n_steps: int) -> None:
    (tmp_path / "short.py").write_text(PROGRAM)
    (tmp_path / "example").write_text(example)
    (tmp_path / "steps").write_text(str(n_steps))
    done = subprocess.run(
        [*DITASK, "--main", "short.main", "--parallel-workers", "4"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=100,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)},
        check=False,
    )
    text = done.stdout
    assert done.returncode == 0, text
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
    name = "best" if example.startswith("cartpole") else "final"
    best = load_checkpoint(folder / "ckpt" / f"{name}.safetensors")
    assert 0 <= best["last_iter"] <= int(last[2].replace(",", ""))
    assert not [path for path in tmp_path.iterdir() if path.name.startswith("ditask-")]
