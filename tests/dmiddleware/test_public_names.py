"""The public names, pinned; and what importing them must not do."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

import dmiddleware
from dmiddleware import pipeline, testing

PACKAGE = [
    "load_policy", "Task", "Context", "kept", "renewed", "produced", "Middleware", "middleware",
    "Event", "StepTimer", "TraceFile", "DMiddlewareError", "PipelineError", "ChainError",
    "MiddlewareError", "ContextError", "TaskStateError", "EventError", "WaitTimeout",
    "EventQueueFull", "train",
]  # fmt: skip

PIPELINE = [
    "Task", "RunningTask", "Context", "Vocabulary", "FieldKind", "kept", "renewed", "produced",
    "Middleware", "Wrapper", "Declarations", "Stateful", "middleware", "middleware_name",
    "middleware_location", "around", "SkipRest", "Group", "Wrapped", "Layer", "Lock",
    "ChainView", "ChainTable", "ChainRow", "Event", "Delivery", "Emission", "EventBus",
    "EventCounters", "EventRouter", "Clock", "Running", "SystemClock", "Patience", "StepTimer",
    "Timing", "TraceFile", "merge_traces", "CurrentNode", "Progress", "running_as",
    "current_node",
]  # fmt: skip

TESTING = [
    "FakeClock", "Tape", "Simulation", "SimulationError", "Cluster", "ClusterNode", "Delivered",
    "assert_resume_exact",
]  # fmt: skip


@pytest.mark.parametrize(
    ("package", "names"), [(dmiddleware, PACKAGE), (pipeline, PIPELINE), (testing, TESTING)]
)
def test_the_public_names_are_these(package, names):
    assert package.__all__ == names
    for name in names:
        value = getattr(package, name)
        if inspect.isclass(value) or inspect.isfunction(value):
            assert value.__doc__, f"{name} has no docstring"


@pytest.mark.process
def test_importing_the_package_imports_nothing_heavy():
    program = """
import sys
import dmiddleware
heavy = {"torch", "treetensor", "gymnasium", "rich", "easydict", "pynng", "matplotlib"}
loaded = heavy.intersection(sys.modules)
assert not loaded, loaded
import dmiddleware.testing
loaded = (heavy - {"pynng"}).intersection(sys.modules)
assert not loaded, loaded
import middleware
loaded = {"torch._dynamo", "matplotlib", "requests"}.intersection(sys.modules)
assert not loaded, loaded
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=100)
