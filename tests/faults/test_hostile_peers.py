"""Hostile peers, at small size."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.faults.fault_result import FaultResult
from tests.faults.hostile_peers import (
    false_lengths,
    forged_refusals,
    malformed_handshakes,
    noise,
    oversize,
    pickles,
    refusals,
    replayed_replies,
)
from tests.variants import mostly_slow

pytestmark = pytest.mark.process


@pytest.mark.parametrize("transport", mostly_slow(["tcp", "ipc", "tls+tcp"], keep=1))
@pytest.mark.parametrize("result_of", [false_lengths, oversize, refusals, pickles])
def test_unauthenticated_peers_receive_nothing_and_disturb_no_one(
    transport: str, result_of: Callable[[str], FaultResult]
) -> None:
    result = result_of(transport)
    assert result.holds, result


def test_malformed_handshakes_disturb_no_one() -> None:
    result = malformed_handshakes("ipc")
    assert result.holds, result


def test_forged_refusals_do_not_end_a_dialer() -> None:
    result = forged_refusals("ipc", codes=("replaced", "key"))
    assert result.holds, result


def test_replayed_replies_do_not_hide_that_a_listener_hangs() -> None:
    result = replayed_replies("tcp")
    assert result.holds, result


def test_random_bytes_and_damaged_frames_crash_no_node() -> None:
    # Only `make faults` checks the round trip of other peers, on an otherwise idle machine.
    result = noise("tcp", n_bytes=100_000, connections=20, frames=300, slower_at_most=None)
    assert result.holds, result
