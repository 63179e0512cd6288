"""Training runs whose processes are all killed, and that are resumed."""

from __future__ import annotations

import pytest

from tests.faults.killed_run import killed_run

pytestmark = pytest.mark.process


@pytest.mark.timeout(240)
def test_a_run_whose_processes_are_all_killed_continues() -> None:
    result = killed_run(
        "ipc",
        kills=1,
        main="tests.middleware.resumable_program.main",
        roles="learner=1,collector=1",
        arguments=("--exp-name", "run", "--every-train-iter", "32", "--max-env-step", "16384"),
        solved=None,
    )
    assert result.holds, result


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_that_is_killed_at_20_random_moments_ends_solved() -> None:
    result = killed_run("ipc", kills=20)
    assert result.holds, result
