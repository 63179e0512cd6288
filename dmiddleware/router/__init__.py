"""The router: events between processes and hosts, lossless, ordered and authenticated."""

from dmiddleware.router.codec import Codec, TypeAdapter
from dmiddleware.router.node import NodeOptions
from dmiddleware.router.router import EventTraffic, PeerTraffic, Router
from dmiddleware.router.topology import NodePlan, plan

__all__ = [
    "Router",
    "NodeOptions",
    "EventTraffic",
    "PeerTraffic",
    "Codec",
    "TypeAdapter",
    "NodePlan",
    "plan",
]
