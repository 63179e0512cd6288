"""A learner that fails and is restarted, at small size."""

from __future__ import annotations

import pytest

from tests.faults.restart_faults import failed_learner

pytestmark = pytest.mark.process


@pytest.mark.parametrize(
    ("transport", "ends", "slow_s"), [("ipc", "raises", 0.0), ("tcp", "kill -9", 0.6)]
)
def test_a_learner_that_fails_leaves_what_was_sent_to_it_to_its_successor(
    transport: str, ends: str, slow_s: float
) -> None:
    result = failed_learner(transport, count=150, ends=ends, slow_s=slow_s)
    assert result.holds, result
