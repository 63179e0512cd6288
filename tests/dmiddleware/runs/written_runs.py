"""Folders of runs, as training leaves them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from dmiddleware.runs.metrics_file import METRICS_FILE, MetricsFile

__all__ = ["write_run"]


def write_run(
    folder: Path,
    returns: Sequence[float | None],
    *,
    settings: dict[str, Any] | None = None,
    axis: str = "env_step",
    every: int = 100,
) -> Path:
    """Write a run with an evaluation every so many steps, and other metrics before each."""
    folder.mkdir(parents=True, exist_ok=True)
    if settings is not None:
        (folder / "config.yaml").write_text(yaml.safe_dump(settings))
    file = MetricsFile(folder / METRICS_FILE)
    for number, value in enumerate(returns, 1):
        file.append({axis: every * number, "learn/total_loss": 0.5})
        file.append({axis: every * number, "eval/return_mean": value})
    return folder
