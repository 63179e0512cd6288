"""Read the TensorBoard events that a run has written."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tensorboardX.proto.event_pb2 import Event

__all__ = ["events_in", "values_in"]


def events_in(file: Path) -> Iterator[Any]:
    """Yield the events of a file."""
    data, at = file.read_bytes(), 0
    while at < len(data):
        (length,) = struct.unpack_from("<Q", data, at)
        yield Event.FromString(data[at + 12 : at + 12 + length])
        at += length + 16


def values_in(folder: Path) -> Iterator[tuple[int, Any]]:
    """Yield the step and the summary of everything that was logged below a folder, in order."""
    for file in sorted(folder.rglob("events*")):
        for event in events_in(file):
            for value in event.summary.value:
                yield event.step, value
