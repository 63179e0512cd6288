"""A plugin for pytest that writes each test's outcome to a file as soon as the test ends.

The file is named by the environment variable OUTCOMES. Each line is JSON: the id of a test, or of a
file that could not be collected; "passed", "skipped" or "failed"; and the reason in one line.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Read ``parametrize("weight, ", [...])`` as pytest did before version 9."""
    markers = metafunc.definition.own_markers
    for i, mark in enumerate(markers):
        if mark.name == "parametrize" and isinstance(mark.args[0], str):
            names = mark.args[0].strip(", ")
            markers[i] = pytest.mark.parametrize(names, *mark.args[1:], **mark.kwargs).mark


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" or not report.passed:
        _write(report)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if not report.passed:
        _write(report)


def _write(report: pytest.TestReport | pytest.CollectReport) -> None:
    reason = "" if report.passed else _reason(report)
    with Path(os.environ["OUTCOMES"]).open("a") as file:
        file.write(json.dumps([report.nodeid, report.outcome, reason]) + "\n")


def _reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    if isinstance(report.longrepr, tuple):
        return report.longrepr[-1]  # The reason of a test that was skipped.
    crash = getattr(report.longrepr, "reprcrash", None)
    if crash is not None:
        return crash.message.splitlines()[0]
    return str(report.longrepr).strip().splitlines()[-1].removeprefix("E").strip()
