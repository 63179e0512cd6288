"""Around a run: its metrics file, the comparison of runs, and pages about them.

None of it needs the program that made the runs; on the command line it is ``ditask compare``,
``ditask report``, ``ditask watch`` and ``ditask inspect``.
"""

from dmiddleware.runs.compare import Comparison, TaskRow, compare
from dmiddleware.runs.metrics_file import MetricsFile, read_metrics
from dmiddleware.runs.record import RunRecord, find_runs
from dmiddleware.runs.report import write_report
from dmiddleware.runs.statistics import (
    Estimate,
    interquartile_mean,
    interval_of,
    mean_score,
    performance_profile,
    probability_of_improvement,
)

__all__ = [
    "Comparison",
    "Estimate",
    "MetricsFile",
    "RunRecord",
    "TaskRow",
    "compare",
    "find_runs",
    "interquartile_mean",
    "interval_of",
    "mean_score",
    "performance_profile",
    "probability_of_improvement",
    "read_metrics",
    "write_report",
]
