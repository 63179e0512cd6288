"""Packages of optional extras: tests that need one are skipped without it, except in CI."""

from __future__ import annotations

import importlib
import importlib.util
import os
import warnings
from typing import Any

import pytest


def skip_without(module: str) -> None:
    """Skip a file, or a test, without the module; it is imported where it is used."""
    if "CI" not in os.environ and importlib.util.find_spec(module) is None:
        pytest.skip(f"needs the package {module}", allow_module_level=True)


def needed(module: str) -> Any:
    """Import and return a module of an extra."""
    skip_without(module)
    with warnings.catch_warnings():
        # SWIG's modules crash where their warnings are errors.
        warnings.simplefilter("ignore")
        return importlib.import_module(module)
