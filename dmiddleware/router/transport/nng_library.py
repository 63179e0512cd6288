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

from dmiddleware.errors import TransportError

__all__ = ["THREADS_VARIABLE", "ffi", "lib"]

THREADS_VARIABLE: Final = "DMIDDLEWARE_NNG_THREADS"
"""The environment variable with the number of nng's threads of each kind. Two are the default: more
only take turns on a few cores, and one learner with many cores and peers may be faster with more.
"""

ffi: Final[Any] = _nng.ffi
"""Makes and reads C objects."""

lib: Final[Any] = _nng.lib
"""nng's functions and constants."""


def _limit_threads() -> None:
    """Set how many threads nng starts; this has no effect once it has been used."""
    text = os.environ.get(THREADS_VARIABLE, "2")
    if not text.isdecimal() or not 1 <= int(text) <= 64:
        raise TransportError(f"{THREADS_VARIABLE} must be a number from 1 to 64, got {text!r}")
    for parameter in (
        lib.NNG_INIT_NUM_TASK_THREADS,
        lib.NNG_INIT_MAX_TASK_THREADS,
        lib.NNG_INIT_NUM_POLLER_THREADS,
        lib.NNG_INIT_MAX_POLLER_THREADS,
        lib.NNG_INIT_NUM_EXPIRE_THREADS,
        lib.NNG_INIT_MAX_EXPIRE_THREADS,
        lib.NNG_INIT_NUM_RESOLVER_THREADS,
    ):
        lib.nng_init_set_parameter(parameter, int(text))


_limit_threads()

# nng's threads do not exist in a fork of this process, which would wait for them forever.
_end_nng: Final[Any] = pynng.nng._pynng_atexit
os.register_at_fork(after_in_child=lambda: atexit.unregister(_end_nng))
