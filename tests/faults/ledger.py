"""Ledgers of what nodes sent and received, and their comparison.

Every node appends lines to its own file, one JSON list each, in a single write: the lines stay in
the file when the process is killed. ``CLOCK_MONOTONIC`` is the same clock for all processes of a
host, so times in different ledgers can be compared.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dmiddleware.process.closing import Closing

__all__ = ["Writer", "Ledger", "Comparison", "compare", "compare_killed", "join"]


class Writer(Closing):
    """Appends lines to a ledger.

    Args:
        path: the file; created if it is missing.
    """

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)

    def __call__(self, what: str, *details: Any) -> None:
        """Write a line: what happened, when, and the details."""
        os.write(self._file, json.dumps([what, time.monotonic(), *details]).encode() + b"\n")


class Ledger:
    """Reads a ledger that may still grow.

    Args:
        path: the file, which need not exist yet.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._lines: list[list[Any]] = []

    def lines(self, what: str = "", *, since: float = 0.0) -> list[list[Any]]:
        """Return the complete lines so far: ``[what, time, *details]``."""
        if self._path.exists():
            with self._path.open("rb") as file:
                file.seek(self._offset)
                raw = file.read()
            whole = raw[: raw.rfind(b"\n") + 1]
            self._offset += len(whole)
            self._lines += [json.loads(line) for line in whole.splitlines()]
        return [line for line in self._lines if line[0] == (what or line[0]) and line[1] >= since]

    def sent(self, event: str = "e") -> int:
        """Return the number of accepted messages, over all starts of the node."""
        return sum(line[2] == event for line in self.lines("sent"))

    def got(self, sender: int, start: int, event: str = "e") -> list[tuple[int, bool]]:
        """Return ``(number, whole)`` of the messages from one start of a sender, in order."""
        return [
            (number, whole)
            for _, _, name, node, begun, number, whole in self.lines("got")
            if (name, node, begun) == (event, sender, start)
        ]


@dataclass(frozen=True, slots=True)
class Comparison:
    """How many messages arrived as they should.

    Attributes:
        accepted: messages that had to arrive.
        arrived: distinct messages that arrived.
        lost: messages that were accepted but never arrived.
        duplicated: repeated arrivals of the same message.
        reordered: arrivals of a message after a later one.
        damaged: messages that arrived with other content.
        invented: messages that arrived but were never sent.
    """

    accepted: int = 0
    arrived: int = 0
    lost: int = 0
    duplicated: int = 0
    reordered: int = 0
    damaged: int = 0
    invented: int = 0

    @property
    def clean(self) -> bool:
        """Whether every accepted message arrived once, whole and in order."""
        faults = (self.lost, self.duplicated, self.reordered, self.damaged, self.invented)
        return self.accepted > 0 and not any(faults)

    def __str__(self) -> str:
        text = f"{self.accepted:,} accepted, {self.lost} lost"
        others = {
            "duplicated": self.duplicated,
            "out of order": self.reordered,
            "damaged": self.damaged,
            "never sent": self.invented,
        }
        return text + "".join(f", {count} {name}" for name, count in others.items() if count)


def compare(accepted: int, got: Sequence[tuple[int, bool]], *, emitted: int = 0) -> Comparison:
    """Compare the ledgers of a sender and a receiver.

    Args:
        accepted: messages 0 to ``accepted - 1`` had to arrive.
        got: ``(number, whole)`` of each arrival, in order.
        emitted: number of messages that may have arrived; 0: as many as had to.
    """
    seen: set[int] = set()
    duplicated = reordered = 0
    highest = -1
    for number, _ in got:
        duplicated += number in seen
        reordered += number < highest and number not in seen
        seen.add(number)
        highest = max(highest, number)
    return Comparison(
        accepted=accepted,
        arrived=len(seen),
        lost=sum(number not in seen for number in range(accepted)),
        duplicated=duplicated,
        reordered=reordered,
        damaged=sum(not whole for _, whole in got),
        invented=sum(number >= (emitted or accepted) for number in seen),
    )


def compare_killed(sent: Iterable[Sequence[Any]], got: Sequence[tuple[int, bool]]) -> Comparison:
    """Compare the ledgers of a killed sender, whose acknowledged messages must have arrived.

    Messages that it had accepted but not delivered died with it. Some of them may still have
    arrived, but without a gap.

    Args:
        sent: its lines ``["sent", time, event, started_at, number, waiting]``.
        got: as in :func:`compare`.
    """
    lines = list(sent)
    acknowledged = max((number + 1 - waiting for *_, number, waiting in lines), default=0)
    begun = max((number + 2 for *_, number, _ in lines), default=1)
    reached = max((number + 1 for number, _ in got), default=0)
    return compare(max(acknowledged, reached), got, emitted=begun)


def join(comparisons: Iterable[Comparison]) -> Comparison:
    """Add up comparisons."""
    all_of = list(comparisons)
    return Comparison(*(sum(getattr(one, name) for one in all_of) for name in Comparison.__slots__))
