"""Around a run: its metrics file, the comparison of runs, pages about them, and its policy.

None of it needs the program that made the runs; on the command line it is ``ditask compare``,
``ditask report``, ``ditask watch``, ``ditask inspect``, ``ditask play`` and ``ditask export``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dmiddleware.process.late_imports import late_names
from dmiddleware.runs.budget import Budget
from dmiddleware.runs.compare import (
    Comparison,
    Difference,
    OverallRow,
    TaskRow,
    compare,
    compare_runs,
)
from dmiddleware.runs.metrics_file import MetricsFile, read_metrics
from dmiddleware.runs.reach import Reach
from dmiddleware.runs.record import RunRecord, find_runs
from dmiddleware.runs.report import write_report
from dmiddleware.runs.statistics import (
    Estimate,
    detectable_difference,
    difference_of_means,
    interquartile_mean,
    interval_of,
    last_tenth,
    least_visible_difference,
    mean_score,
    performance_profile,
    probability_of_improvement,
    runs_to_detect,
)

if TYPE_CHECKING:
    from dmiddleware.runs.export import ExportedPolicy, Port, export_policy
    from dmiddleware.runs.model_card import write_model_card
    from dmiddleware.runs.saved_policy import load_policy

__all__ = [
    "Budget",
    "Comparison",
    "Difference",
    "Estimate",
    "MetricsFile",
    "OverallRow",
    "Reach",
    "RunRecord",
    "TaskRow",
    "compare",
    "compare_runs",
    "detectable_difference",
    "difference_of_means",
    "find_runs",
    "interquartile_mean",
    "interval_of",
    "last_tenth",
    "least_visible_difference",
    "mean_score",
    "performance_profile",
    "probability_of_improvement",
    "read_metrics",
    "runs_to_detect",
    "write_report",
    "load_policy",
    "export_policy",
    "ExportedPolicy",
    "Port",
    "write_model_card",
]

# Imported when used: the other commands answer without torch.
__getattr__ = late_names(
    __name__,
    {
        "load_policy": "dmiddleware.runs.saved_policy",
        "export_policy": "dmiddleware.runs.export",
        "ExportedPolicy": "dmiddleware.runs.export",
        "Port": "dmiddleware.runs.export",
        "write_model_card": "dmiddleware.runs.model_card",
    },
)
