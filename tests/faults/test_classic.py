"""A classic parallel training whose processes are killed."""

from __future__ import annotations

import pytest

from tests.faults.classic_faults import killed_classic

pytestmark = [pytest.mark.process, pytest.mark.slow]


@pytest.mark.timeout(300)
def test_a_classic_training_ends_though_each_of_its_processes_was_killed() -> None:
    roles = ("collector", "learner", "coordinator")
    result = killed_classic("ipc", roles=roles)
    assert result.holds, result.checks
