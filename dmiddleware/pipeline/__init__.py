"""The pipeline floor: contexts, middleware, tasks and events. It knows nothing of learning."""

from dmiddleware.pipeline.context import (
    Context,
    OfflineRLContext,
    OnlineRLContext,
    kept,
    produced,
    renewed,
)
from dmiddleware.pipeline.declare import Middleware, Role, middleware
from dmiddleware.pipeline.task import Task

__all__ = [
    "Context",
    "OnlineRLContext",
    "OfflineRLContext",
    "kept",
    "renewed",
    "produced",
    "Middleware",
    "Role",
    "middleware",
    "Task",
]
