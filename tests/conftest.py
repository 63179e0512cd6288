"""What holds for all tests."""

import logging
import signal
import sys
from collections.abc import Iterator
from unittest import mock

import pytest

# filelock, which torch's compiler and the examples import, adds an audit hook for good. With any
# such hook, CPython 3.11 sometimes fails to start a thread while coverage is measured: two threads
# install their trace functions at once.
with mock.patch.object(sys, "addaudithook"):
    import filelock  # noqa: F401

# A shell that starts a command in the background makes it ignore Ctrl-C, and so would all the
# processes that the tests start and interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _same_level_of_the_root_logger() -> Iterator[None]:
    """Undo a test's, or a library's, change of the level that all later tests would log at."""
    level = logging.getLogger().level
    yield
    logging.getLogger().setLevel(level)
