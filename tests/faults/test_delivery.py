"""Bursts, slow consumers and slow readers, at small size."""

from __future__ import annotations

import pytest

from tests.faults.delivery_faults import KB, MB, burst, slow_consumer, slow_weight_reader
from tests.faults.large_frames import large_frames
from tests.faults.process_cluster import SHARED_MEMORY
from tests.variants import mostly_slow

pytestmark = pytest.mark.process


@pytest.mark.parametrize("transport", mostly_slow(["tcp", "ipc", "tls+tcp", SHARED_MEMORY], keep=1))
def test_a_burst_of_small_messages_arrives(transport: str) -> None:
    result = burst(transport, count=2_000, size=KB)
    assert result.holds, result


@pytest.mark.parametrize("transport", mostly_slow(["tls+tcp", "ipc", "tcp", SHARED_MEMORY], keep=1))
def test_a_burst_of_large_messages_from_a_listener_arrives(transport: str) -> None:
    result = burst(transport, count=40, size=MB, from_listener=True)
    assert result.holds, result


def test_the_ledgers_show_messages_that_an_unacknowledged_bus_loses() -> None:
    assert burst("ipc", count=500, size=KB, batch=KB).holds
    result = burst("ipc", count=500, size=KB, batch=KB, on_bus=True, quiet_s=0.5)
    assert not result.holds
    assert " 0 lost" not in result.checks[0].measured


@pytest.mark.parametrize("transport", mostly_slow([SHARED_MEMORY, "ipc", "tls+tcp"], keep=1))
def test_a_slow_consumer_makes_the_producer_wait_and_memory_stays_bounded(transport: str) -> None:
    result = slow_consumer(transport, count=240, size=256 * KB, slow_s=0.02, bound=12 * MB)
    assert result.holds, result


def test_a_slow_reader_of_weights_does_not_slow_the_others_down() -> None:
    result = slow_weight_reader("tcp", count=20, size=256 * KB, slow_s=0.4)
    assert result.holds, result


def test_peers_that_receive_large_events_at_once_stay_connected() -> None:
    result = large_frames("tcp", peers=16, size_mb=10, rounds=2)
    assert result.holds, result
