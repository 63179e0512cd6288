"""The modules that configs name in ``import_names``."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Iterable
from typing import Final

from dmiddleware.registry import import_modules

__all__ = ["import_named", "without_di_engine"]

_log = logging.getLogger(__name__)

_PACKAGES: Final = ("ding", "dizoo")


def import_named(names: Iterable[str] | None) -> None:
    """Import the modules of a config, so that they register their names.

    Modules of DI-engine are left out where it is not importable: what they register is registered
    here.

    Args:
        names: the config's ``import_names``; None: there are none.

    Raises:
        ModuleNotFoundError: if another module cannot be found.
    """
    import_modules(without_di_engine(names))


def without_di_engine(names: Iterable[str] | None, place: str = "import_names") -> list[str]:
    """Return the modules of a config without those of DI-engine that cannot be imported.

    Args:
        names: the config's ``import_names``; None: there are none.
        place: where they are, for the log.
    """
    modules = [names] if isinstance(names, str) else [*(names or ())]
    missing = [module for module in modules if _is_missing(module)]
    if missing:
        _log.info("%s: %s of DI-engine is not imported", place, ", ".join(missing))
    return [module for module in modules if module not in missing]


def _is_missing(module: str) -> bool:
    package = str(module).partition(".")[0]
    return package in _PACKAGES and importlib.util.find_spec(package) is None
