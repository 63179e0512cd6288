"""Strangers, with small figures."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.faults.hostile_rows import false_lengths, noise, oversize, pickles, refusals, silence
from tests.faults.row import Row

pytestmark = pytest.mark.process


@pytest.mark.parametrize("transport", ["ipc", "tcp"])
@pytest.mark.parametrize("row_of", [false_lengths, oversize, refusals, pickles, silence])
def test_strangers_get_nothing_and_disturb_no_one(
    transport: str, row_of: Callable[[str], Row]
) -> None:
    row = row_of(transport)
    assert row.holds, row


def test_noise_and_broken_frames_crash_no_one() -> None:
    # The others' round trip is judged by `make faults`, on a machine that does nothing else.
    row = noise("tcp", n_bytes=100_000, connections=20, frames=300, slower_at_most=None)
    assert row.holds, row
