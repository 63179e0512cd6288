"""Training runs whose collector or learner is killed once."""

from __future__ import annotations

import pytest

from tests.faults.training_faults import killed_collectors, killed_rank

pytestmark = pytest.mark.process


# Five processes with torch; tests/dmiddleware/distributed/test_lost_ranks.py has the ranks alone.
@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_killed_rank_ends_the_other_with_an_error_that_names_it() -> None:
    result = killed_rank("ipc", kills=0)
    assert result.holds, result


@pytest.mark.slow
def test_a_training_survives_a_killed_collector() -> None:
    result = killed_collectors("ipc", kills=1)
    assert result.holds, result
