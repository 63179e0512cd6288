"""Strangers, at small size."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

from tests.faults.delivery_faults import MB
from tests.faults.fault_result import FaultResult
from tests.faults.strangers import memory_hogs, silence, unread_replies
from tests.variants import mostly_slow


@pytest.mark.process
@pytest.mark.parametrize("transport", mostly_slow(["tcp", "ipc", "tls+tcp"], keep=1))
@pytest.mark.parametrize(
    "attack",
    [silence, partial(memory_hogs, size=20 * MB), partial(unread_replies, lasts_s=3.0)],
    ids=["silence", "memory hogs", "unread replies"],
)
def test_connections_without_the_key_cost_little(
    attack: Callable[[str], FaultResult], transport: str
) -> None:
    result = attack(transport)
    assert result.holds, result
