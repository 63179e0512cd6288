from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dmiddleware.pipeline import Task
from dmiddleware.testing import FakeClock
from middleware import OnlineRLContext
from middleware.record.run_folder import RunFolder


@pytest.fixture(autouse=True)
def warm(warm_processes: None) -> None:
    """Fork the processes of these tests."""


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunFolder]:
    with RunFolder.create("run", root=tmp_path) as folder:
        yield folder


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def run_steps(clock: FakeClock) -> Any:
    """Run a chain in a new task, close it, and return the last context."""

    def run_steps(*chain: Any, n_steps: int = 1, ctx: Any = None, seed: int = 0) -> Any:
        with Task(OnlineRLContext() if ctx is None else ctx, seed=seed, clock=clock) as task:
            for one in chain:
                task.use(one)
            task.run(max_step=n_steps)
            return task.ctx

    return run_steps
