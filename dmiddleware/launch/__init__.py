"""Starts the processes of a run, watches over them, and ends them.

:func:`launch` is what the command ``ditask`` is, for programs and notebooks. :func:`join_run` is
for those who start processes by other means: it makes a process one node of a run that
:func:`plan_run` has planned.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dmiddleware.process.late_imports import late_names

if TYPE_CHECKING:
    from dmiddleware.launch.hosts.submitit import SubmititRun
    from dmiddleware.launch.node import JoinedNode, join_run
    from dmiddleware.launch.options import LaunchOptions
    from dmiddleware.launch.plan import NodePlan, RunPlan, plan_run
    from dmiddleware.launch.run import Run, launch
    from dmiddleware.launch.status import NodeStatus

__all__ = [
    "launch",
    "Run",
    "join_run",
    "JoinedNode",
    "plan_run",
    "RunPlan",
    "NodePlan",
    "NodeStatus",
    "LaunchOptions",
    "SubmititRun",
]

# Imported when used: `ditask --help` must answer at once.
__getattr__ = late_names(
    __name__,
    {
        "launch": "dmiddleware.launch.run",
        "Run": "dmiddleware.launch.run",
        "join_run": "dmiddleware.launch.node",
        "JoinedNode": "dmiddleware.launch.node",
        "plan_run": "dmiddleware.launch.plan",
        "RunPlan": "dmiddleware.launch.plan",
        "NodePlan": "dmiddleware.launch.plan",
        "NodeStatus": "dmiddleware.launch.status",
        "LaunchOptions": "dmiddleware.launch.options",
        "SubmititRun": "dmiddleware.launch.hosts.submitit",
    },
)
