"""The router: events between processes and hosts, lossless, ordered and authenticated."""

from dmiddleware.router.codec import Codec, TypeAdapter
from dmiddleware.router.options import NodeOptions
from dmiddleware.router.router import Router
from dmiddleware.router.topology import NodePlan, plan
from dmiddleware.router.traffic import EventTraffic, PeerTraffic

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
