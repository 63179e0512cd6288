"""Compression of packed step data."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable
from typing import Final

from dmiddleware.errors import ConfigError

try:
    from lz4 import frame as lz4
except ImportError:  # the extra [classic]
    lz4 = None

__all__ = ["COMPRESSORS", "compress", "decompress", "usable_compressor"]

COMPRESSORS: Final = ("none", "zlib", "lz4")
"""The names of the compressors."""

_log = logging.getLogger(__name__)


def usable_compressor(name: str) -> str:
    """Return the compressor to use for ``name``: zlib, with a warning, where lz4 is missing.

    Raises:
        ConfigError: for an unknown name.
    """
    if name not in COMPRESSORS:
        raise ConfigError(f"the compressor must be one of {', '.join(COMPRESSORS)}, got {name!r}")
    if name == "lz4" and lz4 is None:
        _log.warning(
            "lz4 is not installed, so zlib compresses the step data; "
            "for lz4: pip install 'dmiddleware[classic]'"
        )
        return "zlib"
    return name


def compress(name: str, data: bytes) -> bytes:
    """Compress bytes with the compressor of this name."""
    return _compressors(name)[0](data)


def decompress(name: str, data: bytes) -> bytes:
    """Decompress bytes with the compressor of this name.

    Raises:
        ConfigError: if the compressor is not installed, or unknown.
        ValueError: if the bytes are damaged.
    """
    try:
        return _compressors(name)[1](data)
    except (zlib.error, RuntimeError, EOFError) as error:
        raise ValueError(f"the data cannot be decompressed with {name}: {error}") from error


def _compressors(name: str) -> tuple[Callable[[bytes], bytes], Callable[[bytes], bytes]]:
    if name == "none":
        return bytes, bytes
    if name == "zlib":
        return zlib.compress, zlib.decompress
    if name == "lz4" and lz4 is not None:
        return lz4.compress, lz4.decompress
    raise ConfigError(
        f"the compressor {name!r} is not available; install lz4 with: "
        "pip install 'dmiddleware[classic]'"
    )
