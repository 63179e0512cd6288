"""Frames that take long to send, to more peers than the machine has cores."""

from __future__ import annotations

from tests.benchmarks.bench_nodes import ROOT, free_port, star
from tests.faults.fault_result import FaultResult

__all__ = ["large_frames"]

_MB = 1 << 20


def large_frames(transport: str, *, peers: int, size_mb: int, rounds: int) -> FaultResult:
    """Send large events to many peers at once.

    Args:
        transport: only ``tcp``.
        peers: number of peers, in a few processes.
        size_mb: size of each event in MB.
        rounds: number of events.
    """
    result = FaultResult(f"{rounds} events of {size_mb} MB to {peers} peers", transport)
    with star(ROOT, f"tcp://127.0.0.1:{free_port()}", peers) as hub:
        hub.ask("wait_for", peers)
        measured = hub.ask("weights", size_mb * _MB, peers, rounds)
    left, missing = measured["left"], measured["missing"]
    reasons = f": {measured['reasons']}" if left else ""
    result.check("no peer counts as lost", f"{left} departures{reasons}", not left)
    result.check("every peer gets each event", f"{missing} missing", not missing)
    return result
