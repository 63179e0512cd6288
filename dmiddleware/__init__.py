"""Reinforcement-learning training programs as a chain of middleware.

The names here are the pipeline: contexts, middleware, tasks and events, and the error tree. What
learns is in the packages ``env``, ``data``, ``model``, ``rl``, ``policy`` and ``worker``, and the
stock middleware that joins both is in the package ``middleware``. Importing this package does not
import torch.
"""

from importlib.metadata import version as _version

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
    OfflineRLContext,
    OnlineRLContext,
    Role,
    StepTimer,
    Task,
    TraceFile,
    kept,
    middleware,
    produced,
    renewed,
)

__version__ = _version("dmiddleware")

__all__ = [
    "Task",
    "Context",
    "OnlineRLContext",
    "OfflineRLContext",
    "kept",
    "renewed",
    "produced",
    "Middleware",
    "Role",
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
]
