"""A training whose collector is killed once."""

from __future__ import annotations

import pytest

from tests.faults.training_faults import killed_collectors

pytestmark = [pytest.mark.process, pytest.mark.slow]


def test_a_training_gets_over_the_death_of_a_collector() -> None:
    result = killed_collectors("ipc", kills=1)
    assert result.holds, result
