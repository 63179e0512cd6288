"""The benchmark of training on a GPU, on the CPU."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.process]


def test_the_benchmark_for_gpus_runs_small_on_the_cpu(tmp_path):
    command = [sys.executable, "-m", "tests.benchmarks.gpu", str(tmp_path), "--small"]
    command += ["--only", "cartpole-4096", "--modes", "eager", "graphs, bfloat16"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True)
    text = (tmp_path / "gpu.md").read_text()
    assert text == run.stdout
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| PPO")]
    assert [row[1] for row in rows] == ["eager", "graphs, bfloat16"]
    assert all(float(row[2].replace(",", "")) > 0 for row in rows)
