"""Too many open files: errors give the number, the limit and the remedy."""

from __future__ import annotations

import errno
import subprocess
import sys
import textwrap

import pytest

from dmiddleware.process.open_files import explained, naming_the_limit

PROGRAM = """
    import resource, sys
    import gymnasium
    from dmiddleware.env import AsyncEnvManager
    from dmiddleware.router import Router

    def make():
        return gymnasium.make("CartPole-v1")

    def processes():
        AsyncEnvManager([make] * 24).launch()

    def sockets():
        files = []
        try:
            while True:
                files.append(open("/dev/null"))
        except OSError:
            files.pop().close()
        Router(node_id=0, listen="tcp://127.0.0.1:0", key=bytes(range(32))).__enter__()

    if __name__ == "__main__":
        resource.setrlimit(resource.RLIMIT_NOFILE, (20, 20))
        {what}()
"""


@pytest.mark.process
@pytest.mark.parametrize("what", ["processes", "sockets"])
def test_a_process_without_descriptors_says_what_to_do(what, tmp_path):
    (tmp_path / "program.py").write_text(textwrap.dedent(PROGRAM).replace("{what}", what))
    done = subprocess.run(
        [sys.executable, "program.py"], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert "too many files and sockets open (its limit is 20, and " in last
    assert "ulimit -n" in last
    assert "of env" in last if what == "processes" else "could not" in last


def test_other_errors_keep_their_text():
    error = OSError(errno.ENOSPC, "No space left on device")
    assert explained(error) == str(error)
    with pytest.raises(OSError, match="No space left") as caught, naming_the_limit("write"):
        raise error
    assert caught.value is error


def test_the_kind_of_the_error_stays():
    error = OSError(errno.ENFILE, "Too many open files in system")
    expected = pytest.raises(OSError, match="cannot open a thing: the system has too many")
    with expected as caught, naming_the_limit("open a thing"):
        raise error
    assert caught.value.errno == errno.ENFILE
