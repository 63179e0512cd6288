"""A training run whose collector is killed once."""

from __future__ import annotations

import pytest

from tests.faults.training_faults import killed_collectors

pytestmark = [pytest.mark.process, pytest.mark.slow]


def test_a_training_survives_a_killed_collector() -> None:
    result = killed_collectors("ipc", kills=1)
    assert result.holds, result
