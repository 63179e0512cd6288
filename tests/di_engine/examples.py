"""The example programs of a checkout of DI-engine, each run unmodified for a short budget."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from tests.di_engine.rows import Row, counts
from tests.di_engine.watched import MARK

__all__ = ["BUDGET_S", "run", "run_example"]

BUDGET_S: Final = 20.0
_LIMIT_S: Final = 300.0

_FIRST: Final = ("dqn", "sac", "collect_demo_data")
"""Programs whose checkpoints and data others read, as DI-engine's documentation asks for."""

_NO_INDEX: Final[Mapping[str, str]] = {
    "d4rl": "it needs D4RL, which no index has for a current Gymnasium",
    "einops": "it needs D4RL, which no index has for a current Gymnasium",  # of its env's file
    "gym_hybrid": "it needs gym_hybrid, which no index has",
}
"""Packages that no index has; the reason for programs that import them."""


def run(checkout: Path, only: str = "", seconds: float = BUDGET_S) -> Iterator[Row]:
    """Yield a row for each program of ``ding/example``."""
    files = sorted((checkout / "ding" / "example").glob("*.py"))
    names = [file.stem for file in files if file.stem != "__init__" and only in file.stem]
    names.sort(key=lambda name: (_FIRST.index(name) if name in _FIRST else len(_FIRST), name))
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            file = checkout / "ding" / "example" / f"{name}.py"
            yield run_example(file, checkout, Path(folder), seconds)[0]


def run_example(
    file: Path, checkout: Path, folder: Path, seconds: float = BUDGET_S, seed: int = 0
) -> tuple[Row, dict[str, Any]]:
    """Run one program in a folder; return its row, and what was seen."""
    command = [sys.executable, "-m", "tests.di_engine.watched", str(file), str(checkout)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path.cwd())}
    try:
        ended = subprocess.run(
            [*command, str(seconds), str(seed)],
            cwd=folder, env=env, capture_output=True, text=True, timeout=_LIMIT_S, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return Row(file.stem, "example", "fails", f"no end after {_LIMIT_S:g} s"), {}
    lines = [line for line in ended.stdout.splitlines() if line.startswith(MARK)]
    if ended.returncode == 0 and lines:
        seen = json.loads(lines[-1].removeprefix(MARK))
        return Row(file.stem, "example", "runs", _in_words(seen)), seen
    return _not_run(file.stem, ended.stderr), {}


def _not_run(name: str, stderr: str) -> Row:
    lines = [line for line in stderr.splitlines() if line and not line.startswith(" ")]
    error = next((line for line in reversed(lines) if "Error" in line or "NotHere" in line), "")
    for package, reason in _NO_INDEX.items():
        if f"No module named '{package}'" in error:
            return Row(name, "example", "refused", reason)
    absent = re.search(r"No module named '((?:ding|dizoo)\.[^']+)'", error)
    if absent is not None:
        return Row(
            name, "example", "refused", f"it imports {absent[1]}, which DI-engine does not have"
        )
    kind, _, text = error.partition(": ")
    is_refusal = kind.startswith("dmiddleware.")
    return Row(
        name, "example", "refused" if is_refusal else "fails", (text if is_refusal else error)[:300]
    )


def _in_words(seen: dict[str, Any]) -> str:
    evaluations = seen["evaluations"]
    best = f", best return {max(evaluations):g}" if evaluations else ""
    stopped = seen.get("stopped") or "its last step"
    return f"{seen['env_step']} env steps, {seen['train_iter']} updates{best}; {stopped}"


if __name__ == "__main__":
    rows = []
    for row in run(Path(sys.argv[1]).absolute(), *sys.argv[2:3]):
        print(f"{row.name:30} {row.outcome:8} {row.reason}", flush=True)
        rows.append(row)
    print(counts(rows))
