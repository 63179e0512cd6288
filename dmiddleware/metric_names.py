"""The names of metrics, which files, TensorBoard and trackers have to take."""

from __future__ import annotations

import re
from collections.abc import Collection
from functools import lru_cache
from typing import Final

from dmiddleware.errors import MiddlewareError

__all__ = ["as_metric_name", "check_metric_name", "is_metric_name"]

_PART: Final = r"[\w.\-]+"
_NAME: Final = re.compile(rf"{_PART}(/{_PART})*")


@lru_cache(maxsize=4096)
def is_metric_name(name: str, reserved: tuple[str, ...] = ()) -> bool:
    """Return whether a text can be the name of a metric; see :func:`check_metric_name`."""
    return name not in reserved and _NAME.fullmatch(name) is not None


def check_metric_name(name: object, reserved: Collection[str] = ()) -> None:
    """Reject what cannot be the name of a metric.

    Args:
        name: the name.
        reserved: the names of columns that rows of metrics have anyway.

    Raises:
        MiddlewareError: naming it, and what to write instead.
    """
    if not isinstance(name, str):
        raise MiddlewareError(
            f"the name of a metric is a text, got {name!r:.100} of type {type(name).__name__}; "
            "write ctx.log('group/name', value)"
        )
    if name in reserved:
        raise MiddlewareError(
            f"the metric {name!r} would replace the column {name} that every row of metrics has; "
            f"log it under another name, such as 'my/{name}'"
        )
    if not is_metric_name(name):
        better = as_metric_name(name)
        raise MiddlewareError(
            f"the name of a metric consists of letters, digits, '_', '-' and '.', in groups "
            f"separated by single slashes, got {name!r:.100}; write "
            f"{better or 'group/name'!r}"
        )


@lru_cache(maxsize=4096)
def as_metric_name(text: str) -> str:
    """Return the name of a metric that is nearest to a text; it is empty if the text has none."""
    parts = (re.sub(r"[^\w.\-]+", "_", part.strip()) for part in text.split("/"))
    return "/".join(filter(None, parts))
