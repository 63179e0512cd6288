"""nng's functions, and the end of a process that uses them."""

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
    import pynng

    with pynng.Pair0(listen="inproc://a") as one, pynng.Pair0(dial="inproc://a") as other:
        one.send(b"hello")
        assert other.recv() == b"hello"
    listener.close()
    print("ended")
"""
STILL_CLOSING = """
    import pynng, threading
    from dmiddleware.router.transport.nng_stream import Operation

    def free_late(operation, free=Operation.free):
        print("ended", flush=True)
        # The interpreter ends meanwhile.
        threading.main_thread().join()
        free(operation)

    Operation.free = free_late
    listener.close()
"""


@pytest.mark.process
@pytest.mark.parametrize(
    "program", [FORK, WITH_PYNNG, STILL_CLOSING], ids=["fork", "with pynng", "still closing"]
)
def test_the_process_ends_in_order(program: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(START) + textwrap.dedent(program)],
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert (done.returncode, done.stdout) == (0, "ended\n"), done.stderr
