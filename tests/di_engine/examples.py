"""The example programs of a checkout of DI-engine, each run unmodified for a short budget."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.di_engine.rows import Row, counts
from tests.di_engine.watched import MARK

__all__ = ["BUDGET_S", "run", "run_example"]

BUDGET_S = 20.0
_LIMIT_S = 300.0


def run(checkout: Path, only: str = "", seconds: float = BUDGET_S) -> list[Row]:
    """Return a row for each program of ``ding/example``."""
    files = sorted((checkout / "ding" / "example").glob("*.py"))
    names = [file for file in files if file.name != "__init__.py" and only in file.name]
    return [run_example(file, checkout, seconds)[0] for file in names]


def run_example(
    file: Path, checkout: Path, seconds: float = BUDGET_S, seed: int = 0
) -> tuple[Row, dict[str, Any]]:
    """Run one program in a folder of its own; return its row, and what was seen."""
    command = [sys.executable, "-m", "tests.di_engine.watched", str(file), str(checkout)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path.cwd())}
    with tempfile.TemporaryDirectory() as folder:
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
    error = next((line for line in reversed(ended.stderr.splitlines()) if line.strip()), "")
    outcome = "refused" if error.startswith("dmiddleware.") else "fails"
    return Row(file.stem, "example", outcome, error[:300]), {}  # type: ignore[arg-type]


def _in_words(seen: dict[str, Any]) -> str:
    evaluations = seen["evaluations"]
    best = f", best return {max(evaluations):g}" if evaluations else ""
    stopped = seen.get("stopped") or "its last step"
    return f"{seen['env_step']} env steps, {seen['train_iter']} updates{best}; {stopped}"


if __name__ == "__main__":
    rows = run(Path(sys.argv[1]).absolute(), *sys.argv[2:3])
    for row in rows:
        print(f"{row.name:30} {row.outcome:8} {row.reason}", flush=True)
    print(counts(rows))
