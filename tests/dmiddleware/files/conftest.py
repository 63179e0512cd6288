"""What the tests of files share."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def warm(warm_processes: None) -> None:
    """Fork the processes of these tests."""
