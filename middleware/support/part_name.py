"""Names of parts of a chain, which keep apart what several of one kind measure and write."""

from __future__ import annotations

from typing import Annotated, Final

from dmiddleware.pipeline.context import is_part_name
from dmiddleware.settings import BY_PROGRAM, Settings
from middleware.metrics import MIDDLEWARE_METRICS

__all__ = ["PartSettings", "require_part_name"]

_METRICS: Final = [metric.name for group in MIDDLEWARE_METRICS.values() for metric in group]
_RESERVED: Final = {"env_step", "time_s", "train_iter"}.union(
    name.partition("/")[0] for name in _METRICS if not name.startswith("<")
)


class PartSettings(Settings):
    """The options of a middleware that can belong to a named part of a chain."""

    name: Annotated[str | None, BY_PROGRAM] = None
    """The part of the chain that it belongs to, which has a context of its own; None: the whole
    chain."""

    def __post_init__(self) -> None:
        """Refuse a name that is not for metrics and files."""
        super().__post_init__()
        require_part_name(self, self.name)


def require_part_name(settings: Settings, name: str | None) -> None:
    """Refuse the setting ``name`` if metrics and files cannot begin with it, or others do.

    Args:
        settings: the settings of the part.
        name: its name; None: it has none.

    Raises:
        ConfigError: with the name and what it must be.
    """
    if name is not None:
        is_word = is_part_name(name)
        settings.require(is_word, "name", "of letters, digits, '_', '-' and '.', 64 at most")
        is_free = name not in _RESERVED
        settings.require(is_free, "name", f"another word than {', '.join(sorted(_RESERVED))}")
