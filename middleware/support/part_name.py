"""Names of parts of a chain, which keep apart what several of one kind measure and write."""

from __future__ import annotations

import re
from typing import Final

from dmiddleware.settings import Settings
from middleware.metrics import MIDDLEWARE_METRICS

__all__ = ["require_part_name"]

_NAME: Final = re.compile(r"\w[\w.-]{0,63}")
_METRICS: Final = [metric.name for group in MIDDLEWARE_METRICS.values() for metric in group]
_RESERVED: Final = {"env_step", "time_s", "train_iter"}.union(
    name.partition("/")[0] for name in _METRICS if not name.startswith("<")
)


def require_part_name(settings: Settings, name: str | None) -> None:
    """Refuse the setting ``name`` if metrics and files cannot begin with it, or others do.

    Args:
        settings: the settings of the part.
        name: its name; None: it has none.

    Raises:
        ConfigError: with the name and what it must be.
    """
    if name is not None:
        is_word = _NAME.fullmatch(name) is not None
        settings.require(is_word, "name", "of letters, digits, '_', '-' and '.', 64 at most")
        is_free = name not in _RESERVED
        settings.require(is_free, "name", f"another word than {', '.join(sorted(_RESERVED))}")
