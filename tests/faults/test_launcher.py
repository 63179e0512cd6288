"""A launcher that is killed, and one whose output cannot be written."""

from __future__ import annotations

import pytest

from tests.faults.launcher_faults import full_output, killed_launcher

pytestmark = pytest.mark.process


def test_a_killed_launcher_leaves_nothing() -> None:
    result = killed_launcher("ipc", kills=1)
    assert result.holds, result


def test_a_launcher_whose_output_is_full_stops_its_nodes_in_order() -> None:
    result = full_output("ipc")
    assert result.holds, result
