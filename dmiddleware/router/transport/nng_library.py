"""nng's own functions, from pynng, without the rest of pynng.

The package imports asyncio for its sockets, which takes 50 ms. Its extension module, which has all
that byte streams need, takes 1 ms. A run starts many processes.
"""

from __future__ import annotations

import atexit
import importlib.util
import os
import sys
from importlib.machinery import PathFinder
from types import ModuleType
from typing import Any, Final

__all__ = ["ffi", "lib"]

_NAME: Final = "pynng._nng"


def _load() -> ModuleType:
    """Return the extension module; a later import of pynng finds it too."""
    package = importlib.util.find_spec("pynng")
    spec = None
    if package is not None:
        spec = PathFinder.find_spec(_NAME, package.submodule_search_locations)
    if spec is None or spec.loader is None:
        raise ImportError("pynng is missing; install it with: pip install 'pynng>=0.9'")
    module = importlib.util.module_from_spec(spec)
    sys.modules[_NAME] = module
    spec.loader.exec_module(module)
    atexit.register(_finish, module.lib, os.getpid())
    return module


def _finish(lib: Any, pid: int) -> None:
    """End nng's threads before the interpreter ends; a fork of this process has none of them."""
    if os.getpid() == pid:
        lib.nng_fini()


_module = sys.modules.get(_NAME) or _load()
ffi: Final[Any] = _module.ffi
"""Makes and reads C objects."""

lib: Final[Any] = _module.lib
"""nng's functions and constants."""
