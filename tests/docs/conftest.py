"""Settings of the documentation's tests."""

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread():
    # The networks on these pages are small: more threads wait for each other more than they work.
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
