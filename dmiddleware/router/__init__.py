"""The router carries events between processes and hosts: lossless, ordered and authenticated."""

from dmiddleware.router.protocol.counters import EventTraffic, PeerTraffic
from dmiddleware.router.protocol.options import NodeOptions
from dmiddleware.router.protocol.topology import NodeAddresses, plan
from dmiddleware.router.router import Router
from dmiddleware.router.wire.codec import Codec, TypeAdapter

__all__ = [
    "Router",
    "NodeOptions",
    "EventTraffic",
    "PeerTraffic",
    "Codec",
    "TypeAdapter",
    "NodeAddresses",
    "plan",
]
