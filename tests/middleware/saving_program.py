"""Save snapshots until killed, again and again: ``python -m tests.middleware.saving_program``.

Each start resumes the newest snapshot, checks it, and continues. Its arguments are a folder, the
number of kills, and a seed.
"""

from __future__ import annotations

import functools
import itertools
import os
import random
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from dmiddleware import Task
from dmiddleware.data import PrioritySampler, TensorBuffer
from dmiddleware.data.ring import row_ring
from middleware import OnlineRLContext, SnapshotSaver

MOST_CALLS = 20_000
N_ROWS = 7


def batch(first: int) -> dict[str, torch.Tensor]:
    """Return rows that are known by their index."""
    index = torch.arange(first, first + N_ROWS)
    return {
        "obs": index.float()[:, None].expand(N_ROWS, 4).contiguous(),
        "done": index % 5 == 4,
        "reward": index.float(),
        "next_obs": (index + 1).float()[:, None].expand(N_ROWS, 4).contiguous(),
        "episode_id": index // 5,
    }


def check(buffer: TensorBuffer) -> None:
    """Assert that a buffer has the rows that a run which was never killed has."""
    if not len(buffer):
        return
    held = buffer.get(buffer.index)
    assert torch.equal(held.reward, torch.from_numpy(buffer.index).float())
    assert torch.equal(held.next_obs[:, 0], held.reward + 1)
    left = buffer.steps_left(buffer.index[:-5])
    assert torch.equal(left, 4 - torch.from_numpy(buffer.index[:-5]) % 5)


def kill_after(n_calls: int) -> None:
    """Kill this process when its functions have been called or have returned so often."""
    calls = itertools.count()

    def count(*_: Any) -> None:
        if next(calls) >= n_calls:
            os.kill(os.getpid(), signal.SIGKILL)

    threading.setprofile(count)
    sys.setprofile(count)


def run(folder: Path, on_saved: Callable[[], None]) -> None:
    """Resume, check what was resumed, and save until the process is killed."""
    buffer = TensorBuffer(300, sampler=PrioritySampler(), store_next_obs=False,
                          follow_episodes=True, seed=0)  # fmt: skip
    snapshots = SnapshotSaver(folder, parts={"buffer": buffer})

    def pushed() -> int:
        return int(buffer.index[-1]) + 1 if len(buffer) else 0

    def push(ctx: Any) -> None:
        buffer.push(batch(pushed()))
        index = buffer.sample(4)["index"]
        buffer.update_priority(index, index.float())
        ctx.task.at_step_end(save)

    def save() -> None:
        snapshots.save(task)
        on_saved()

    with Task(OnlineRLContext(), seed=0) as task:
        task.use(push).use(snapshots)
        assert snapshots.resume(task) == bool(snapshots.paths)
        check(buffer)
        print(pushed() // N_ROWS, flush=True)
        task.run()


def main(folder: Path, n_kills: int, seed: int) -> None:
    """Kill a child of this process at random moments, most of them after its first snapshot."""
    row_ring._BLOCKS, row_ring._SMALLEST_BLOCK = 8, 1
    rng = random.Random(seed)
    for number in range(n_kills):
        kill = functools.partial(kill_after, rng.randrange(MOST_CALLS))
        child = os.fork()
        if not child:
            try:
                if number % 4 == 3:
                    kill()
                run(folder, on_saved=kill)
            except BaseException:  # noqa: BLE001 (the child must not return)
                traceback.print_exc()
            os._exit(1)
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status), "the child ended by itself, before it was killed"


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
