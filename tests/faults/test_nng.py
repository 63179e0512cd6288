"""Faults of nng, at small size."""

from __future__ import annotations

import pytest

from tests.faults.nng_faults import deadline_races


@pytest.mark.process
def test_closing_channels_at_the_deadlines_of_their_requests_aborts_no_process() -> None:
    result = deadline_races(runs=2, closes=256)
    assert result.holds, result
