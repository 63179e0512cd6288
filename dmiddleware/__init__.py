"""Reinforcement-learning training programs as a chain of middleware.

This module has the names of the pipeline: contexts, middleware, tasks, events and errors. The
learning components are in the packages ``env``, ``data``, ``model``, ``rl``, ``policy``,
``reward`` and ``rollout``. The package ``middleware`` has the stock middleware, and the contexts
and roles of reinforcement learning. The interface of DI-engine's older pipeline is in ``classic``
and ``worker``. Importing this package does not import torch.

``dmiddleware.train("dqn", "CartPole-v1")`` trains in one call; it is imported when it is used.
"""

from typing import Any

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

__all__ = [
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


_LATER = {"train": "middleware.programs"}
"""Names that import torch, when they are first asked for."""


def __getattr__(name: str) -> Any:
    if name in _LATER:
        from importlib import import_module

        return getattr(import_module(_LATER[name]), name)
    if name == "__version__":
        # Looked up only when it is asked for: this import takes a sixth of the package's.
        from importlib.metadata import version

        return version("dmiddleware")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
