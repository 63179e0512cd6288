"""Reinforcement-learning training programs as a chain of middleware.

This module has the names of the pipeline: contexts, middleware, tasks, events and errors. The
learning components are in the packages ``env``, ``data``, ``model``, ``rl``, ``policy``,
``reward`` and ``rollout``. The package ``middleware`` has the stock middleware, and the contexts
and roles of reinforcement learning. The interface of DI-engine's older pipeline is in ``classic``
and ``worker``. Importing this package does not import torch.

``train("dqn", "CartPole-v1")`` trains in one call, and ``load_policy("runs/x")`` loads what a run
has saved. Both import torch when they are first used.
"""

from typing import TYPE_CHECKING

from dmiddleware.errors import (
    ChainError,
    ContextError,
    DMiddlewareError,
    EventError,
    EventQueueFull,
    MiddlewareError,
    PipelineError,
    TaskStateError,
    WaitTimeout,
)
from dmiddleware.pipeline import (
    Context,
    Event,
    Middleware,
    StepTimer,
    Task,
    TraceFile,
    kept,
    middleware,
    produced,
    renewed,
)
from dmiddleware.process.late_imports import late_names

if TYPE_CHECKING:
    from dmiddleware.runs.saved_policy import load_policy

__all__ = [
    "load_policy",
    "Task",
    "Context",
    "kept",
    "renewed",
    "produced",
    "Middleware",
    "middleware",
    "Event",
    "StepTimer",
    "TraceFile",
    "DMiddlewareError",
    "PipelineError",
    "ChainError",
    "MiddlewareError",
    "ContextError",
    "TaskStateError",
    "EventError",
    "WaitTimeout",
    "EventQueueFull",
    "train",
]

# Looked up when used: some import torch, and the version takes a sixth of this import.
__getattr__ = late_names(
    __name__,
    {
        "__version__": "dmiddleware.version",
        "load_policy": "dmiddleware.runs.saved_policy",
        "train": "middleware.programs",
    },
)
