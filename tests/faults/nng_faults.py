"""Faults of nng itself."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.faults.fault_result import FaultResult

__all__ = ["deadline_races"]

_ROOT = Path(__file__).resolve().parents[2]


def deadline_races(*, runs: int, closes: int) -> FaultResult:
    """Close nng channels at the moment when their requests reach their deadlines.

    Args:
        runs: number of processes, one after the other.
        closes: how many channels each process closes.
    """
    result = FaultResult(f"{runs * closes:,} channels of nng closed at a deadline", "nng over tcp")
    command = [sys.executable, "-m", "tests.dmiddleware.router.nng_racing_program", str(closes)]
    ended = [
        subprocess.run(command, cwd=_ROOT, timeout=600, capture_output=True, text=True)
        for _ in range(runs)
    ]
    failed = [one for one in ended if one.returncode]
    result.check("no process aborted or failed", f"{len(failed)} of {runs} did", not failed)
    done = sum(int(one.stdout or 0) for one in ended)
    result.check("all channels closed, all requests failed", f"{done:,}", done == runs * closes)
    return result
