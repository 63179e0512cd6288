"""Tools for testing chains: a fake clock, a tape, simulated threads and simulated clusters."""

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
]
