"""One line of docs/di-engine.md: what became of one program, config or test of DI-engine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

__all__ = ["Outcome", "Row", "counts"]

Outcome = Literal["runs", "refused", "fails"]


@dataclass(frozen=True)
class Row:
    """What became of one file or test.

    Attributes:
        name: its path in the checkout; of a test, its id in pytest.
        group: the table's section that it belongs to.
        outcome: whether it runs to its end, is refused with a reason, or fails.
        reason: why it does not run, in one line.
    """

    name: str
    group: str
    outcome: Outcome
    reason: str = ""


def counts(rows: Iterable[Row]) -> dict[Outcome, int]:
    """Return how many rows have each outcome."""
    tally = Counter(row.outcome for row in rows)
    return {"runs": tally["runs"], "refused": tally["refused"], "fails": tally["fails"]}
