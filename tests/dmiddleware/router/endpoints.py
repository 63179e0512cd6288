"""Addresses, and what two routers need to be connected over them in a certain way."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["RouterEndpoints"]


@dataclass
class RouterEndpoints:
    """An address, the settings of the router that listens, and those of the one that dials."""

    address: str
    listens: dict[str, Any]
    dials: dict[str, Any]
