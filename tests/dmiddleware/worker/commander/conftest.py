"""What the tests of the commanders share."""

from __future__ import annotations

import pytest

from tests.dmiddleware.worker.commander.now import Now


@pytest.fixture
def now() -> Now:
    return Now()
