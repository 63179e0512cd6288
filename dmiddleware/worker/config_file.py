"""Reading the config files of DI-engine, which are Python code."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dmiddleware.errors import ConfigError

__all__ = ["read_config", "read_config_with_system"]


def read_config(path: str | Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Run a config file, and return what it defines.

    The file is Python code, as DI-engine's config files are. Its folder is on the path for imports
    from then on, because ``import_names`` may name modules beside it. Code below
    ``if __name__ == "__main__":`` does not run.

    Args:
        path: the file.

    Returns:
        ``main_config`` and ``create_config``; the second is empty if there is none.

    Raises:
        ConfigError: if it cannot be read, imports a module that is not installed, or defines no
            ``main_config``.
    """
    main, create, _ = read_config_with_system(path)
    return main, create


def read_config_with_system(
    path: str | Path,
) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any] | None]:
    """Run a config file, and return what it defines, also for several processes.

    Args:
        path: the file; see :func:`read_config`.

    Returns:
        ``main_config``, ``create_config`` and ``system_config``; the last is None if the file
        defines none, so it is for one process.

    Raises:
        ConfigError: as :func:`read_config` does.
    """
    defined = _run(path)
    main, create = defined.get("main_config"), defined.get("create_config")
    if not isinstance(main, Mapping):
        names = [name for name, value in defined.items() if isinstance(value, Mapping)]
        own = [name for name in names if not name.startswith("__")]
        raise ConfigError(
            f"{path} defines no main_config, only {', '.join(own) or 'no dictionaries'}; a config "
            "file has the dictionaries main_config and create_config"
        )
    system = defined.get("system_config")
    for name, section in (("create_config", create), ("system_config", system)):
        if section is not None and not isinstance(section, Mapping):
            raise ConfigError(f"{name} in {path} must be a dictionary, got {section!r:.100}")
    return dict(main), dict(create or {}), None if system is None else dict(system)


def _run(path: str | Path) -> dict[str, Any]:
    """Run a file, and return the names that it defines."""
    file = Path(path).resolve()
    if not file.is_file():
        raise ConfigError(f"there is no config file {path}")
    if str(file.parent) not in sys.path:
        sys.path.insert(0, str(file.parent))
    try:
        return runpy.run_path(str(file), run_name=file.stem)
    except ModuleNotFoundError as error:
        hint = ""
        if (error.name or "").partition(".")[0] in ("ding", "ditk", "dizoo", "gym"):
            hint = "; ditask classic finds DI-engine's modules, and so does import dmiddleware.ding"
        raise ConfigError(f"{path} imports {error.name}, which is not installed{hint}") from error
    except (SyntaxError, NameError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
