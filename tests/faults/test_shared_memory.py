"""Shared memory that is full, or whose users are killed, at small size."""

from __future__ import annotations

import pytest

from tests.faults.shared_memory_faults import full, killed_in_transfer, why_not_full

pytestmark = pytest.mark.process


def test_the_slabs_of_killed_processes_are_removed() -> None:
    result = killed_in_transfer("shared memory", kills=1)
    assert result.holds, result


def test_messages_bypass_full_shared_memory() -> None:
    if reason := why_not_full():
        pytest.skip(reason)
    result = full("shared memory", count=20)
    assert result.holds, result
