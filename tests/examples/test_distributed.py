"""An example in four processes: the same program, one folder, one last line."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from dmiddleware.data import load_checkpoint

ROOT = Path(__file__).parents[2]
DITASK = [sys.executable, "-c", "from dmiddleware.launch.cli import ditask; ditask()"]
# Enough for each to collect, learn and evaluate.
PROGRAM = """
import examples.common
from examples.cartpole_dqn import main as train

examples.common.FRESH_EPISODES = 5

def main():
    result = train(seed=1, exp_name="short", max_env_step=2000)
    if result.mean_return == result.mean_return:
        print("judged", flush=True)
"""


@pytest.mark.process
def test_cartpole_trains_in_four_processes(tmp_path: Path) -> None:
    (tmp_path / "short.py").write_text(PROGRAM)
    done = subprocess.run(
        [*DITASK, "--main", "short.main", "--parallel-workers", "4", "--topology", "mesh"],
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
        r"^\[node (\d)\] mean return [\d.]+ over 5 fresh episodes of the best policy, after "
        r"([\d,]+) env steps and ([\d,]+) updates in [\d.]+ s; files in runs/short/$",
        text,
        re.MULTILINE,
    )
    assert last[0] == "0"
    assert int(last[1].replace(",", "")) >= 2000
    assert re.findall(r"^\[node (\d)\] judged$", text, re.MULTILINE) == ["0"]
    assert set(re.findall(r"^\[node (\d)\] step ", text, re.MULTILINE)) <= {"0"}
    best = load_checkpoint(folder / "ckpt" / "best.safetensors")
    assert 0 <= best["last_iter"] <= int(last[2].replace(",", ""))
    assert not [path for path in tmp_path.iterdir() if path.name.startswith("ditask-")]
