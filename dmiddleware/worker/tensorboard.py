"""A tensorboard writer that is made when it is first needed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tensorboardX import SummaryWriter

__all__ = ["LazyWriter"]


class LazyWriter:
    """Holds a given ``SummaryWriter``, or makes one of its own when it is asked for.

    Args:
        writer: a writer, which stays its owner's to close, or None.
        folder: where an own writer writes.
    """

    def __init__(self, writer: Any, folder: Path) -> None:
        self._writer = writer
        self._folder = folder
        self._own = False

    def get(self) -> Any:
        """Return the writer."""
        if self._writer is None:
            # With its default of 10, a burst of scalars waits for the disk.
            self._writer = SummaryWriter(str(self._folder), max_queue=1000)
            self._own = True
        return self._writer

    def close(self) -> None:
        """Close an own writer; it is made again if it is asked for again."""
        if self._own:
            self._writer.close()
            self._writer, self._own = None, False
