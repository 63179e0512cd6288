"""Reinforcement-learning training programs as a chain of middleware.

The names here are the pipeline: contexts, middleware, tasks and events, and the error tree. What
learns is in the packages ``env``, ``data``, ``model``, ``rl``, ``policy`` and ``worker``, and the
stock middleware that joins both is in the package ``middleware``. Importing this package does not
import torch.
"""

from dmiddleware.errors import DMiddlewareError
from dmiddleware.pipeline import (
    Context,
    Middleware,
    OfflineRLContext,
    OnlineRLContext,
    Role,
    Task,
    kept,
    middleware,
    produced,
    renewed,
)

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
    "DMiddlewareError",
]
