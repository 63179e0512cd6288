"""The limits of nng that docs/decisions/nng.md describes, measured by the C program there.

If one of these tests fails because nng has improved, reconsider the decision.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pynng._nng
import pytest

ROOT = Path(__file__).resolve().parents[4]
PROGRAM = ROOT / "docs" / "decisions" / "nng" / "limits.c"

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(sys.platform != "linux", reason="the program counts descriptors in /proc"),
    pytest.mark.skipif(shutil.which("cc") is None, reason="the program needs a C compiler"),
]


@pytest.fixture(scope="module")
def limits(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """Compile the program; return a function that runs it and returns what it prints."""
    library = Path(pynng._nng.__file__)
    program = tmp_path_factory.mktemp("nng") / "limits"
    command = ["cc", "-O1", "-o", program, PROGRAM, library, f"-Wl,-rpath,{library.parent}"]
    options = ["-Wl,--unresolved-symbols=ignore-in-shared-libs", "-lpthread"]
    subprocess.run([*command, *options], check=True, timeout=60)

    def run(*arguments: str) -> str:
        done = subprocess.run(
            [program, *arguments], check=True, timeout=90, capture_output=True, text=True
        )
        return done.stdout

    return run


def test_nng_keeps_all_silent_connections_and_reports_none(limits: Callable[..., str]) -> None:
    printed = limits("silent", "60", "4")
    last = re.findall(r"after +4 s: (\d+) descriptors, (\d+) pipes", printed)
    assert int(last[0][0]) >= 60 and last[0][1] == "0"
    assert "Too many open files" in printed


def test_nng_crashes_when_a_timeout_races_with_the_close_of_its_socket(
    limits: Callable[..., str],
) -> None:
    with_timeouts, without = re.findall(r"(\d) of \d runs ended", limits("race", "6", "60"))
    assert int(with_timeouts) >= 1
    assert without == "0"


def test_nng_has_no_tls_for_connections_that_the_application_has_accepted(
    limits: Callable[..., str],
) -> None:
    assert re.search(r"tls\+socket://: Not supported", limits("socket"))
