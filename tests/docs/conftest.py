"""Fixtures for the tests of the documentation."""

import pytest


@pytest.fixture(autouse=True)
def own_minari_datasets(tmp_path, monkeypatch):
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))
