"""A learner that fails and is restarted, at small size."""

from __future__ import annotations

import pytest

from tests.faults.restart_faults import failed_learner

pytestmark = pytest.mark.process


@pytest.mark.parametrize(("transport", "slow_s"), [("ipc", 0.0), ("tcp", 0.6)])
def test_a_learner_that_raises_leaves_what_was_sent_to_it_to_its_successor(
    transport: str, slow_s: float
) -> None:
    result = failed_learner(transport, count=150, slow_s=slow_s)
    assert result.holds, result
