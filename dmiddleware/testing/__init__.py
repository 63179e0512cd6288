"""What tests of chains need, this project's own and its users': clocks, a tape, a cluster."""

from dmiddleware.testing.cluster import Cluster, ClusterNode, Delivered
from dmiddleware.testing.fake_clock import FakeClock
from dmiddleware.testing.simulated_threads import SimulationError
from dmiddleware.testing.simulation import Simulation
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
