"""Starts the processes of a run, watches over them, and ends them.

:func:`launch` is what the command ``ditask`` is, for programs and notebooks. :func:`join_run` is
for those who start processes by other means: it makes a process one node of a run that
:func:`plan_run` has planned.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

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

_MODULES = {
    "launch": "run",
    "Run": "run",
    "join_run": "node",
    "JoinedNode": "node",
    "plan_run": "plan",
    "RunPlan": "plan",
    "NodePlan": "plan",
    "NodeStatus": "status",
    "LaunchOptions": "options",
    "SubmititRun": "hosts.submitit",
}


def __getattr__(name: str) -> Any:
    # Imported when used: `ditask --help` must answer at once.
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
