"""The face of ``ditk.logging``: the standard library's logging, which ``ditask`` already shows."""

from __future__ import annotations

import logging as _logging
from logging import *  # noqa: F403
from typing import Any

__all__ = [*_logging.__all__, "try_init_root"]


def try_init_root(level: int = _logging.INFO, *options: Any) -> _logging.Logger:
    """Set the level of the root logger, and give it a handler if it has none."""
    root = _logging.getLogger()
    if not root.handlers:
        _logging.basicConfig(format="%(message)s")
    root.setLevel(level)
    return root
