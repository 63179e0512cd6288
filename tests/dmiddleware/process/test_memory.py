"""Memory that tensors on the CPU take again and again."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

PROGRAM = """
import resource, sys
import torch
from dmiddleware.process.memory import keep_freed_memory
from dmiddleware.policy import DQNPolicy

torch.set_num_threads(1)
MODEL = {"obs_shape": 4, "action_shape": 2}
if sys.argv[1] == "call":
    keep_freed_memory()
elif sys.argv[1] == "learn":
    DQNPolicy({"model": MODEL}, modes=["learn"])
def work():
    tensors = [torch.ones(2**19) for _ in range(12)]
for _ in range(10):
    work()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(30):
    work()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def new_pages(how: str) -> int:
    """Return how many new pages a process takes for 360 tensors of 512 pages each."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    command = [sys.executable, "-c", PROGRAM, how]
    run = subprocess.run(command, env=env, capture_output=True, text=True, check=True, timeout=120)
    return int(run.stdout)


@pytest.mark.process
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc adapts")
@pytest.mark.parametrize("how", [pytest.param("call", marks=pytest.mark.slow), "learn"])
def test_freed_memory_is_used_again(how: str) -> None:
    # Without it, the process usually takes all 184,320 pages again.
    assert new_pages(how) < 20_000
