"""Examples that train one of several algorithms, as parameters of tests."""

from __future__ import annotations

from typing import Any

import pytest

__all__ = ["of_algorithms"]


def of_algorithms(example: str, n_steps: int, *algos: str) -> list[Any]:
    """Return the example, the env steps and ``{"algo": …}`` once for each algorithm."""
    return [pytest.param(example, n_steps, {"algo": algo}, id=algo) for algo in algos]
