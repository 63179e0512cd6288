"""Shared memory whose users are killed, or which is full: briefly."""

from __future__ import annotations

import pytest

from tests.faults.shared_memory_faults import full, killed_in_hand_over, why_not_full

pytestmark = pytest.mark.process


def test_nothing_is_left_of_slabs_whose_users_were_killed() -> None:
    result = killed_in_hand_over(kills=1)
    assert result.holds, result


def test_a_full_file_system_in_memory_is_gone_round() -> None:
    if reason := why_not_full():
        pytest.skip(reason)
    result = full(count=20)
    assert result.holds, result
