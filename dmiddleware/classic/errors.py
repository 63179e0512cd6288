"""The errors of the classic interface."""

from __future__ import annotations

from dmiddleware.errors import PolicyError

__all__ = ["UnknownAttribute"]


class UnknownAttribute(PolicyError, AttributeError, NotImplementedError):
    """A policy has no attribute of this name; DI-engine raises a ``NotImplementedError``."""
