"""What holds for all tests."""

import gc
import logging
import multiprocessing.process
import os
import signal
import subprocess
import sys
from collections.abc import Generator, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from dmiddleware.process.terminal import printable
from dmiddleware.torch_private import plain_torch
from tests.warm_process import NewProcess, WarmProcess

# The collector need not look at the modules and tests that stay until the end.
gc.disable()

# filelock, which torch's compiler and the examples import, adds an audit hook for good. With any
# such hook, CPython 3.11 sometimes fails to start a thread while coverage is measured: two threads
# install their trace functions at once.
with mock.patch.object(sys, "addaudithook"):
    import filelock  # noqa: F401

# More threads slow small networks down, and much more so on a machine with other load.
torch.set_num_threads(1)

# A shell that starts a command in the background makes it ignore Ctrl-C, and nohup the end of the
# terminal; so would all the processes that the tests start and signal.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
for _ending in (signal.SIGHUP, signal.SIGQUIT):
    if signal.getsignal(_ending) is signal.SIG_IGN:
        signal.signal(_ending, signal.SIG_DFL)


COMPILES = torch.__version__ >= "2.13"
FAST = "not slow and not process"
_LONG = ("docs", "examples", "ported", "faults", "middleware")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Start the files that take longest first, so that no process works alone at the end."""

    def rank(item: pytest.Item) -> int:
        folder = item.path.relative_to(Path(__file__).parent).parts[0]
        return _LONG.index(folder) if folder in _LONG else len(_LONG)

    items.sort(key=rank)
    for item in items:
        if item.get_closest_marker("compiled") is not None and not COMPILES:
            item.add_marker(pytest.mark.skip(f"torch {torch.__version__} compiles no updates"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, Any, Any]:
    """Escape captured text that is not Unicode: pytest's processes cannot exchange it."""
    report = yield
    report.sections = [(name, printable(text)) for name, text in report.sections]
    return report


def pytest_collection_finish() -> None:
    """Let the garbage collector work again, on what the tests create."""
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def _same_process() -> Iterator[None]:
    """Undo what a test, or a library, has changed of the process of all later tests."""
    level = logging.getLogger().level
    yield
    logging.getLogger().setLevel(level)
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _no_processes_in_test_fast(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Skip a test in ``make test-fast`` that starts a process although it has no marker."""
    if request.config.option.markexpr != FAST:
        return

    def skip(*_: object, **__: object) -> None:
        pytest.skip("it starts a process")

    monkeypatch.setattr(subprocess.Popen, "_execute_child", skip)
    monkeypatch.setattr(WarmProcess, "_execute_child", skip)
    monkeypatch.setattr(multiprocessing.process.BaseProcess, "start", skip)
    monkeypatch.setattr(os, "fork", skip)


@pytest.fixture
def warm_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork the processes that a test starts, where that makes no difference to it."""
    monkeypatch.setattr(subprocess, "Popen", WarmProcess)


@pytest.fixture
def new_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start the processes of a test anew: it needs to be their parent, or sees what they import."""
    monkeypatch.setattr(subprocess, "Popen", NewProcess)


@pytest.fixture(params=["private torch", "plain torch"])
def either_torch(request: pytest.FixtureRequest) -> Iterator[None]:
    """Run a test through private parts of torch, and again without them."""
    with plain_torch() if request.param == "plain torch" else nullcontext():
        yield
