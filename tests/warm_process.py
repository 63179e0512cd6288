"""Run a Python program in a process that is forked from one that has imported torch.

For tests of what a program prints and leaves behind. Tests of signals, of children, or of what a
program imports start a process of their own.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import runpy
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

__all__ = ["run_warm"]

# The last ones are what a run imports at its start and at its end.
_IMPORTS = [
    *("torch", "gymnasium", "middleware", "dmiddleware.launch.cli", "dmiddleware.launch.run"),
    *("tyro", "matplotlib.figure", "matplotlib.backends.backend_agg"),
]
_CONTEXT = mp.get_context("forkserver")
_CONTEXT.set_forkserver_preload(_IMPORTS)


def run_warm(
    words: Sequence[str], *, cwd: Path, env: Mapping[str, str], timeout: float
) -> subprocess.CompletedProcess[str]:
    """Run a program as ``python -W ignore WORDS`` does, and return its exit code and output.

    Args:
        words: ``-m``, a module and its arguments; or a file and its arguments.
        cwd: the working directory.
        env: all its environment variables.
        timeout: seconds until the program is killed.

    Raises:
        subprocess.TimeoutExpired: if the program was killed.
    """
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder, name) for name in ("stdout", "stderr")]
        arguments = ([*words], cwd.resolve(), {**env}, paths)
        process = _CONTEXT.Process(target=_become, args=arguments)
        process.start()
        process.join(timeout)
        if process.exitcode is None:
            process.kill()
            process.join()
            raise subprocess.TimeoutExpired([*words], timeout)
        stdout, stderr = (path.read_text(encoding="utf-8") for path in paths)
    return subprocess.CompletedProcess([*words], process.exitcode, stdout, stderr)


def _become(words: list[str], cwd: Path, env: dict[str, str], paths: list[Path]) -> None:
    """Be the program, in the process that was forked for it."""
    for stream, path in zip((sys.stdout, sys.stderr), paths, strict=True):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(descriptor, stream.fileno())
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    warnings.simplefilter("ignore")
    sys.path[:0] = filter(None, env.get("PYTHONPATH", "").split(os.pathsep))
    if words[0] == "-m":
        sys.argv[1:] = words[2:]
        sys.path.insert(0, str(cwd))
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        sys.path.insert(0, str(Path(words[0]).resolve().parent))
        runpy.run_path(words[0], run_name="__main__")
