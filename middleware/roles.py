"""The roles of the processes of a run."""

from __future__ import annotations

from enum import StrEnum

__all__ = ["Role"]


class Role(StrEnum):
    """The part that a process plays in a run; define custom roles in another ``StrEnum``.

    ``COORDINATOR`` and ``AGGREGATOR`` are roles of the classic workers.
    """

    LEARNER = "learner"
    COLLECTOR = "collector"
    EVALUATOR = "evaluator"
    COORDINATOR = "coordinator"
    AGGREGATOR = "aggregator"
