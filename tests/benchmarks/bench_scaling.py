"""Collecting in many processes.

`ditask` starts a learner, which only receives batches, and collectors, which act with the Q-network
of the other benchmarks. In the first benchmark, each environment sleeps for 2 ms in each step, like
one that waits for an external simulator. It compares eight collectors with one; each steps eight
environments one after the other and sends batches of 512 steps. The second benchmark steps
CartPole, with 8 environments per collector and batches of 1,024, and compares with the same program
in one process. Here the machine's cores are the limit.
"""

from __future__ import annotations

import os
import re
import statistics
import subprocess
import sys
from pathlib import Path

from tests.benchmarks.report import Row

ROOT = Path(__file__).resolve().parents[2]
N_COLLECTORS = 8
SECONDS = 8.0
REPEATS = 3


def rows() -> list[Row]:
    """Measure environment steps per second."""
    return [
        compare(
            f"{N_COLLECTORS} collectors, steps of 2 ms",
            "1 collector",
            [rate("sleep", N_COLLECTORS, env_num=8, n_sample=512) for _ in range(REPEATS)],
            [rate("sleep", 1, env_num=8, n_sample=512) for _ in range(REPEATS)],
            at_least=7.0,
        ),
        compare(
            "2 collectors, CartPole",
            "one process",
            [rate("cartpole", 2, env_num=8, n_sample=1024) for _ in range(REPEATS)],
            [rate("cartpole", 0, env_num=8, n_sample=1024) for _ in range(REPEATS)],
            at_least=1.0,
        ),
    ]


def rate(env: str, collectors: int, *, env_num: int, n_sample: int) -> float:
    """Run the program with this number of collector processes; 0 means in one process."""
    command = [sys.executable, "-W", "ignore"]
    if collectors:
        command += ["-m", "dmiddleware.launch", "--package", str(ROOT)]
        command += ["--main", "tests.benchmarks.scaling_program.main"]
        command += ["--roles", f"learner=1,collector={collectors}", "--topology", "star"]
    else:
        command += ["-m", "tests.benchmarks.scaling_program"]
    settings = {
        "SCALING_ENV": env,
        "SCALING_ENV_NUM": str(env_num),
        "SCALING_N_SAMPLE": str(n_sample),
        "SCALING_SECONDS": str(SECONDS),
        "SCALING_COLLECTORS": str(max(1, collectors)),
    }
    ended = subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | settings,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    found = re.search(r"rate ([\d.]+)", ended.stdout)
    if found is None:
        raise RuntimeError(f"{command} gave no rate:\n{ended.stdout}\n{ended.stderr}")
    return float(found[1])


def compare(
    name: str, against: str, ours: list[float], reference: list[float], *, at_least: float
) -> Row:
    """Compare the medians of rates."""
    a, b = statistics.median(ours), statistics.median(reference)
    spread = (max(ours) - min(ours)) / (2 * a)
    return Row(
        name,
        against,
        ours=a,
        reference=b,
        ratio=a / b,
        unit="env steps/s",
        at_least=at_least,
        spread=spread,
    )
