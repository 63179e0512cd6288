"""Types and helpers that several stock middleware share."""

from __future__ import annotations

from typing import TypeAlias

from dmiddleware.pipeline import OfflineRLContext, OnlineRLContext

__all__ = ["RLContext"]

RLContext: TypeAlias = OnlineRLContext | OfflineRLContext
"""The context of a middleware that works online and offline."""
