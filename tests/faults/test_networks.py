"""Networks that break or lose packets, and a short soak."""

from __future__ import annotations

import pytest

from tests.faults.network_faults import cut_connections, partition, slow_network
from tests.faults.network_namespaces import why_not
from tests.faults.soak import soak
from tests.variants import mostly_slow

pytestmark = pytest.mark.process


@pytest.fixture
def namespaces_allowed() -> None:
    if reason := why_not():
        pytest.skip(reason)


@pytest.mark.usefixtures("namespaces_allowed")
def test_both_sides_notice_a_partition_and_lose_nothing() -> None:
    result = partition("tcp", cut_s=4.0)
    assert result.holds, result


@pytest.mark.usefixtures("namespaces_allowed")
def test_nothing_is_lost_over_a_lossy_network() -> None:
    result = slow_network("tcp", count=200, delay_s=0.05)
    assert result.holds, result


@pytest.mark.parametrize("transport", mostly_slow(["tcp", "ipc", "tls+tcp"], keep=1))
def test_nothing_is_lost_when_connections_are_cut_repeatedly(transport: str) -> None:
    result = cut_connections(transport, times=30)
    assert result.holds, result


def test_repeated_faults_leave_nothing_behind() -> None:
    result = soak("ipc", lasts_s=1.5, fault_every_s=0.5, check_slope=False, hang_s=1.0)
    assert result.holds, result
