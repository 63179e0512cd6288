"""nng's own functions, from pynng.

pynng registers a function that ends nng when the program exits, and Python calls such functions in
reverse order. The threads that use nng must have ended by then. So all of pynng is imported before
they start, although only its extension module is needed.
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

# nng's threads do not exist in a fork of this process, which would wait for them forever.
_end_nng: Final[Any] = pynng.nng._pynng_atexit
os.register_at_fork(after_in_child=lambda: atexit.unregister(_end_nng))
