"""nng's own functions, from pynng.

pynng ends nng's threads when the program exits. Threads that use nng have to end before, and
functions that were registered later are called earlier; so all of pynng is imported here, although
only its extension module is needed.
"""

from __future__ import annotations

import atexit
import os
from typing import Any, Final

import pynng
from pynng import _nng

__all__ = ["ffi", "lib"]

ffi: Final[Any] = _nng.ffi
"""Makes and reads C objects."""

lib: Final[Any] = _nng.lib
"""nng's functions and constants."""

# A fork of this process has none of these threads, and would wait for them forever.
os.register_at_fork(after_in_child=lambda: atexit.unregister(pynng.nng._pynng_atexit))
