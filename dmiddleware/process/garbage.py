"""The garbage collector, and what a process keeps until it ends."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

__all__ = ["kept_for_good"]


@contextlib.contextmanager
def kept_for_good() -> Iterator[None]:
    """Exempt what this block creates from garbage collection.

    For imports: what modules define stays until the process ends. Without this, the collector looks
    through it again and again, while torch is imported and once more when the process ends, which
    takes a third of the CPU time of a short process with torch.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()
