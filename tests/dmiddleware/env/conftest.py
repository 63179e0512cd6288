import gc
import pathlib
import sys

import psutil
import pytest

# The envs that the tests use must have a name that other processes can import.
sys.path.insert(0, str(pathlib.Path(__file__).parent))


@pytest.fixture
def leaves_nothing_behind():
    """Checks that a test leaves no process, file descriptor or shared memory."""
    gc.collect()
    process, memory = psutil.Process(), pathlib.Path("/dev/shm")
    n_fds, files = process.num_fds(), set(memory.iterdir()) if memory.is_dir() else set()
    children = {child.pid for child in process.children(recursive=True)}
    yield
    gc.collect()
    assert {child.pid for child in process.children(recursive=True)} <= children
    assert process.num_fds() == n_fds
    assert not memory.is_dir() or set(memory.iterdir()) <= files
