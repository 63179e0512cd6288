"""Reading the config files of DI-engine, which are Python code."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dmiddleware.errors import ConfigError

__all__ = ["read_config"]


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
    file = Path(path).resolve()
    if not file.is_file():
        raise ConfigError(f"there is no config file {path}")
    if str(file.parent) not in sys.path:
        sys.path.insert(0, str(file.parent))
    try:
        found = runpy.run_path(str(file), run_name=file.stem)
    except ModuleNotFoundError as error:
        hint = ""
        if (error.name or "").partition(".")[0] in ("ding", "ditk", "dizoo", "gym"):
            hint = "; ditask classic finds DI-engine's modules, and so does import dmiddleware.ding"
        raise ConfigError(f"{path} imports {error.name}, which is not installed{hint}") from error
    except (SyntaxError, NameError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    main, create = found.get("main_config"), found.get("create_config")
    if not isinstance(main, Mapping):
        names = [name for name, one in found.items() if isinstance(one, Mapping)]
        own = [name for name in names if not name.startswith("__")]
        raise ConfigError(
            f"{path} defines no main_config, only {', '.join(own) or 'no dictionaries'}; a config "
            "file has the dictionaries main_config and create_config"
        )
    if create is not None and not isinstance(create, Mapping):
        raise ConfigError(f"create_config in {path} must be a dictionary, got {create!r:.100}")
    return dict(main), dict(create or {})
