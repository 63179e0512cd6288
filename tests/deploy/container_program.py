"""A program that checks that it is in a container, and sends large arrays between two nodes.

The tests copy this file to the working directory of a container.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import numpy as np

from dmiddleware import Context, Task, middleware

MIB = 1 << 20
SIZES = [4 * MIB] * 30 + [24 * MIB] * 4  # a process uses at most 8 MB of the 64 MB of /dev/shm


def check_container() -> None:
    assert os.getuid() == os.getgid() == 10001
    with Path("/proc/1/cmdline").open("rb") as command:
        assert b"ditask" in command.read()
    shm = os.statvfs("/dev/shm")
    assert shm.f_blocks * shm.f_frsize == 64 * MIB
    try:
        Path("/etc/new").write_text("")
    except OSError as error:
        assert error.errno == errno.EROFS, error
    else:
        raise AssertionError("the root is not read-only")


def main() -> None:
    check_container()
    received: list[int] = []

    def receive(number: int, array: np.ndarray[Any, Any]) -> None:
        assert len(array) == SIZES[number] and (array == number).all()
        received.append(number)

    with Task(Context()) as task:

        @middleware(roles=["collector"])
        def collect(ctx: Context) -> None:
            if ctx.total_step < len(SIZES):
                number = ctx.total_step
                array = np.full(SIZES[number], number, np.uint8)
                ctx.task.emit("array", number, array, only_remote=True)

        @middleware(roles=["learner"])
        def learn(ctx: Context) -> None:
            if len(received) < len(SIZES):
                ctx.task.wait_for("array", 60.0)
            else:
                ctx.task.stop("received all arrays")

        if task.has_role("learner"):
            task.on("array", receive)
        task.use(collect).use(learn).run()
    if received:
        assert received == list(range(len(SIZES)))
        print(f"received {sum(SIZES) // MIB} MiB in order", flush=True)
