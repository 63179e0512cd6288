"""Small blocks of buffers, and hashes of states, for tests."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest

from dmiddleware.files.serialization import pack

__all__ = ["digest", "shrink_blocks"]


def shrink_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the smallest buffers have several blocks, as buffers of many rows have."""
    monkeypatch.setattr("dmiddleware.data.ring.row_ring._SMALLEST_BLOCK", 1)
    monkeypatch.setattr("dmiddleware.data.ring.row_ring._BLOCKS", 8)


def digest(state: Any) -> str:
    """Return a hash of everything in a nested state."""
    rest, tensors = pack(state)
    hashed = hashlib.sha256(rest)
    for name in sorted(tensors):
        hashed.update(name.encode() + tensors[name].numpy().tobytes())
    return hashed.hexdigest()
