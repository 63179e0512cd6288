"""What a config that came over the wire may make a worker import."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from dmiddleware.errors import ConfigError

__all__ = ["check_imports", "named_modules"]


def named_modules(cfg: Any) -> Iterator[Any]:
    """Yield the modules that a config makes its reader import.

    These are all ``import_names`` in it, however deep, and the modules of environment ids of the
    form ``module:name``, which Gymnasium imports.
    """
    if isinstance(cfg, Mapping):
        for key, value in cfg.items():
            if key == "import_names":
                yield from value if isinstance(value, list | tuple) else [value]
            elif key in ("id", "env_id") and isinstance(value, str) and ":" in value:
                yield value.partition(":")[0]
            else:
                yield from named_modules(value)
    elif isinstance(cfg, list | tuple):
        for value in cfg:
            yield from named_modules(value)


def check_imports(cfg: Any, allowed: Collection[str]) -> None:
    """Check that a received config names only modules that this process may import.

    Args:
        cfg: the config.
        allowed: the modules that the local config allows. Those that are imported already are
            allowed too, because importing them again runs nothing.

    Raises:
        ConfigError: if it names another one.
    """
    for name in named_modules(cfg):
        if name is not None and not (
            isinstance(name, str) and (name in allowed or name in sys.modules)
        ):
            raise ConfigError(
                f"the task wants to import {name!r}, which this worker does not allow; add it to "
                "import_names of the worker's own config, or import it before the worker starts"
            )
