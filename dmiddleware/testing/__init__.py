"""Tools for testing chains: a fake clock, a tape, simulated threads and simulated clusters.

:func:`assert_resume_exact` checks that a chain continues where it was stopped.
"""

import importlib
from typing import Any

from dmiddleware.testing.cluster import Cluster, ClusterNode, Delivered
from dmiddleware.testing.fake_clock import FakeClock
from dmiddleware.testing.simulation import Simulation, SimulationError
from dmiddleware.testing.tape import Tape

__all__ = [
    "FakeClock",
    "Tape",
    "Simulation",
    "SimulationError",
    "Cluster",
    "ClusterNode",
    "Delivered",
    "assert_resume_exact",
]


def __getattr__(name: str) -> Any:
    # It looks into checkpoints, which need torch; the tools above do without.
    if name == "assert_resume_exact":
        return getattr(importlib.import_module("dmiddleware.runs.resume_exact"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
