"""How the C library handles the memory of tensors on the CPU."""

from __future__ import annotations

from typing import Final

import torch

__all__ = ["keep_freed_memory"]

_LARGEST_BLOCK: Final = 32 * 2**20 - 4096
"""Bytes of the largest block by which glibc adapts."""


def keep_freed_memory() -> None:
    """Make the C library keep up to 64 MB of freed memory.

    At first, glibc returns freed memory to the system at once, and the tensors of each update need
    new pages, which can take as long as computing them, with QR-DQN and IQN for example. It adapts
    to the largest block that was freed (mallopt(3), ``M_MMAP_THRESHOLD``), so this frees a large
    one, which it never touches. Other C libraries ignore it, and so does glibc if an environment
    variable sets the threshold.
    """
    torch.empty(_LARGEST_BLOCK, dtype=torch.uint8)
