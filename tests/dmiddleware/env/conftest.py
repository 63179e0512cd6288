import gc
import pathlib
import sys

import psutil
import pytest

from tests.warm_process import warm_up

# The envs that the tests use must have a name that other processes can import.
sys.path.insert(0, str(pathlib.Path(__file__).parent))


@pytest.fixture(autouse=True)
def processes_of_envs_are_warm(warm_processes):
    """Starts the processes of envs in a tenth of the time."""


@pytest.fixture(scope="module")
def only_new_objects_are_collected():
    """Spares the collector the objects of earlier tests, of which there may be millions."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def leaves_nothing_behind(only_new_objects_are_collected):
    """Checks that a test leaves no process, file descriptor or shared memory."""
    warm_up()
    gc.collect()
    process = psutil.Process()
    n_fds = process.num_fds()
    children = {child.pid for child in process.children(recursive=True)}
    yield
    gc.collect()
    assert {child.pid for child in process.children(recursive=True)} <= children
    assert process.num_fds() == n_fds
    maps = pathlib.Path("/proc/self/maps")
    assert not maps.exists() or "dmiddleware-env" not in maps.read_text()
