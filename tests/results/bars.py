"""Whether trainings reach what they must."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from tests.results.entry import Entry
from tests.results.record import Record

__all__ = ["Records", "missed", "text"]

Records = Mapping[str, Sequence[Record]]
"""The records of each entry, by its name."""


def text(entry: Entry) -> str:
    """Return the bars of an entry as text; empty without any."""
    bars = []
    if entry.at_least is not None and entry.at_least == entry.at_most:
        bars.append(f"= {entry.at_least:g}")
    else:
        if entry.at_least is not None:
            bars.append(f"≥ {entry.at_least:g}")
        if entry.at_most is not None:
            bars.append(f"≤ {entry.at_most:g}")
    if entry.beats is not None:
        bars.append(f"> {entry.beats.algorithm}")
    told = ", ".join(bars)
    return f"{told} (last policy)" if entry.of_last and told else told


def missed(entry: Entry, records: Records) -> list[str]:
    """Return what misses the bars of an entry: trainings, or the mean over all of them."""
    own = records.get(entry.name, ())
    lines = [
        f"{entry.name}, seed {record.seed}: {entry.figure} {_judged(entry, record):g}"
        for record in own
        if not _is_within(entry, _judged(entry, record))
    ]
    others = [] if entry.beats is None else records.get(entry.beats.name, ())
    if own and others:
        mean, other = (
            statistics.mean(_judged(entry, record) for record in some) for some in (own, others)
        )
        if mean <= other:
            lines.append(
                f"{entry.name}: {entry.figure} {mean:g}, {entry.beats.algorithm} {other:g}"
            )
    return lines


def _judged(entry: Entry, record: Record) -> float:
    return record.last if entry.of_last and record.last is not None else record.figure


def _is_within(entry: Entry, figure: float) -> bool:
    low = entry.at_least is not None and figure < entry.at_least
    high = entry.at_most is not None and figure > entry.at_most
    return not (low or high)
