"""The base of the stock middleware."""

from __future__ import annotations

from typing import ClassVar

from dmiddleware.pipeline import Context
from middleware.context import OnlineRLContext

__all__ = ["BaseMiddleware"]


class BaseMiddleware:
    """Base of the middleware that are classes.

    Attributes:
        default_context: the context of a task that was built without one.
    """

    default_context: ClassVar[type[Context]] = OnlineRLContext
