"""Fixtures for the tests of the documentation."""

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread():
    # The networks on these pages are small, so more threads would only slow them down.
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def own_minari_datasets(tmp_path, monkeypatch):
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))
