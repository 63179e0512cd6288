"""Processes that die, hang, fork, start in any order or close in a callback, at small size."""

from __future__ import annotations

import pytest

from tests.faults.dialed_at_once import dialed_at_once
from tests.faults.process_cluster import SHARED_MEMORY
from tests.faults.process_faults import (
    fork_and_close,
    killed_dialers,
    killed_handler,
    killed_listener,
    one_node_id,
    start_order,
    stopped,
)
from tests.variants import mostly_slow

pytestmark = pytest.mark.process
over_tcp = pytest.mark.parametrize("transport", mostly_slow(["tcp", "ipc", "tls+tcp"], keep=1))
over_memory = pytest.mark.parametrize(
    "transport", mostly_slow([SHARED_MEMORY, "ipc", "tcp"], keep=1)
)


@over_tcp
def test_killed_senders_are_noticed_and_their_acknowledged_messages_arrive(
    transport: str,
) -> None:
    result = killed_dialers(transport, kills=1, dialers=2)
    assert result.holds, result


@over_memory
def test_a_killed_receiver_is_replaced_and_the_senders_continue(transport: str) -> None:
    result = killed_listener(transport, kills=1)
    assert result.holds, result


@over_tcp
def test_events_acknowledged_when_handled_survive_a_receiver_that_is_killed(
    transport: str,
) -> None:
    result = killed_handler(transport, kills=1, count=120, slow_s=0.005)
    assert result.holds, result


def test_processes_with_one_node_id_are_told_apart_without_a_clock() -> None:
    result = one_node_id("ipc", restarts=1)
    assert result.holds, result


@pytest.mark.parametrize(("transport", "listener"), [("ipc", True), ("tcp", False)])
def test_a_process_that_hangs_counts_as_lost_and_rejoins(transport: str, listener: bool) -> None:
    result = stopped(transport, hang_s=3.4, listener=listener)
    assert result.holds, result


def test_nodes_find_each_other_in_any_start_order() -> None:
    result = start_order("ipc", times=1, nodes_each=5)
    assert result.holds, result


def test_processes_that_dial_a_tls_listener_at_once_are_all_connected() -> None:
    result = dialed_at_once("tls+tcp", dialers=6, times=2)
    assert result.holds, result


def test_a_fork_is_reported_and_a_close_inside_a_callback_does_not_hang() -> None:
    result = fork_and_close("ipc")
    assert result.holds, result
