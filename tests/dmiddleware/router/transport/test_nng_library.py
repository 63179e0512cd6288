"""nng's functions without the rest of pynng."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

START = """
    import os, sys
    from dmiddleware.router.transport.nng_stream import NngStreamTransport

    listener = NngStreamTransport().listen("tcp://127.0.0.1:0", lambda stream: 0.0)
"""
FORK = """
    if os.fork() == 0:
        sys.exit(0)
    os.wait()
    listener.close()
    print("ended")
"""
WITH_PYNNG = """
    assert "asyncio" not in sys.modules
    import pynng
    from dmiddleware.router.transport.nng_library import lib

    with pynng.Pair0(listen="inproc://a") as one, pynng.Pair0(dial="inproc://a") as other:
        one.send(b"hello")
        assert other.recv() == b"hello"
    assert pynng.lib is lib
    listener.close()
    print("ended")
"""


@pytest.mark.parametrize("program", [FORK, WITH_PYNNG], ids=["fork", "with pynng"])
def test_the_process_ends_in_order(program: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(START) + textwrap.dedent(program)],
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert (done.returncode, done.stdout) == (0, "ended\n"), done.stderr
