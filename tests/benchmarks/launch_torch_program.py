"""The program of the launch benchmark, with torch."""

from __future__ import annotations

import torch  # noqa: F401 (as most programs do)
from launch_program import main

__all__ = ["main"]
