"""The logs of workers, which replay buffers share."""

from __future__ import annotations

from dmiddleware.logs import LazyWriter, TextLog, output_folder, table

__all__ = ["LazyWriter", "TextLog", "output_folder", "table"]
