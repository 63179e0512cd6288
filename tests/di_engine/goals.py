"""Examples on CartPole and Pendulum with a stop value, with three seeds and in several processes.

What returns do not show is seen, too: the range of the actions that reach an env, the role of each
node, and the updates per env step.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from tests.di_engine.examples import run_example
from tests.di_engine.rows import Row

__all__ = ["run"]

_ON_CARTPOLE: Final = (
    "dqn", "ppo", "dqn_new_env", "dqn_nstep", "dqn_nstep_gymnasium", "dqn_per", "c51_nstep",
    "qrdqn_nstep", "iqn_nstep", "ppo_offpolicy", "sql", "r2d2",
)  # fmt: skip
_ON_PENDULUM: Final = ("sac", "ddpg", "td3", "d4pg")
_IN_SEVERAL: Final = ("dqn", "ppo")
_SEEDS: Final = (0, 1, 2)
_SECONDS: Final = 240.0
_REACHED: Final = "has reached stop_value"
_RETURN: Final = "eval/return_mean"
_STOP_VALUE: Final = 195.0
_ROLES: Final = "node 0 learner, node 1 evaluator, node 2 collector, node 3 collector"


def run(checkout: Path, only: str = "") -> Iterator[Row]:
    """Yield a row for each example, with its seeds, and for each under ``ditask``."""
    for name in (*_ON_CARTPOLE, *_ON_PENDULUM):
        if only in name:
            yield _with_seeds(checkout, name)
    for name in _IN_SEVERAL:
        if only in name:
            yield _with_ditask(checkout, name)


def _with_seeds(checkout: Path, name: str) -> Row:
    file = checkout / "ding" / "example" / f"{name}.py"
    said, n_reached = [], 0
    for seed in _SEEDS:
        with tempfile.TemporaryDirectory() as folder:
            row, seen = run_example(file, checkout, Path(folder), _SECONDS, seed)
        reached = _REACHED in str(seen.get("stopped"))
        n_reached += reached
        said.append(_in_words(seen) if seen else row.reason)
    text = f"{n_reached} of {len(_SEEDS)} seeds reach the stop value: {'; '.join(said)}"
    return Row(name, "goal", "runs" if n_reached == len(_SEEDS) else "fails", text)


def _in_words(seen: dict[str, Any]) -> str:
    ratio = seen["train_iter"] / max(1, seen["env_step"])
    bounds = seen.get("actions")
    actions = f", actions {bounds[0]:.2f} to {bounds[1]:.2f}" if bounds else ""
    best, n_steps = max(seen["evaluations"]), seen["env_step"]
    return f"{best:g} after {n_steps} steps, {ratio:.3f} updates a step{actions}"


def _with_ditask(checkout: Path, name: str) -> Row:
    command = [
        sys.executable, "-m", "dmiddleware.launch", "--ding", "--package", str(checkout),
        "--main", f"ding.example.{name}.main", "--parallel-workers", "4", "--topology", "mesh",
    ]  # fmt: skip
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        try:
            ended = subprocess.run(
                command, cwd=folder, env=env, capture_output=True, text=True, timeout=300,
                check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return Row(f"{name} in 4 processes", "goal", "fails", "no end after 300 s")
        logged = [
            [json.loads(line) for line in file.read_text().splitlines()]
            for file in sorted(Path(folder).glob("*/metrics*.jsonl"))
        ]
    roles = ", ".join(f"node {node} {_role_of(rows)}" for node, rows in enumerate(logged))
    best = max((row.get(_RETURN, 0.0) for rows in logged for row in rows), default=0.0)
    n_steps = max((row["env_step"] for rows in logged for row in rows), default=0)
    text = f"exit code {ended.returncode}, {best:g} after {n_steps} env steps; {roles}"
    is_right = ended.returncode == 0 and best >= _STOP_VALUE and roles == _ROLES
    return Row(f"{name} in 4 processes", "goal", "runs" if is_right else "fails", text)


def _role_of(rows: list[dict[str, Any]]) -> str:
    """Return the role of a node by what only that role writes."""
    written = {name.partition("/")[0] for row in rows for name in row}
    if "learn" in written:
        return "learner"
    return "collector" if "collect" in written else "evaluator"


if __name__ == "__main__":
    for row in run(Path(sys.argv[1]).absolute(), *sys.argv[2:3]):
        print(f"{row.name:30} {row.outcome:8} {row.reason}", flush=True)
