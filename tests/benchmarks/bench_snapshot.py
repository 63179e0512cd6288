"""Snapshots of large buffers.

A full buffer is saved by `SnapshotSaver(keep=2)` again and again, each time after further 1% of its
rows are new. The reference is the first of these snapshots, which writes everything. A snapshot
shares its unchanged files with the last but one, so it writes the rows of two intervals, rounded up
to whole blocks. Bytes are those of all files that a snapshot writes, in the worst of the ten
measured; durations are medians, with the flush to the disk.

A row of 4 floats is one of CartPole: obs, action, reward, next_obs, done, terminated, truncated and
episode_id, 55 bytes; with 3-step returns and priorities, 16 bytes for the link to the next row and
the priority come with it. Priorities are saved as a whole, because the updates in between, one of
64 rows for every fourth new row, change them all over the buffer. A row of frames is one of Atari:
a frame of 84x84 bytes, stored once, in episodes of 200 steps.
"""

from __future__ import annotations

import statistics
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dmiddleware import Task
from dmiddleware.data import PrioritySampler, TensorBuffer, as_tree
from middleware import OnlineRLContext, SnapshotSaver
from tests.benchmarks.report import Row

SIZE = 1_000_000
SIZE_FRAMES = 100_000
N_SNAPSHOTS = 10
AT_MOST = 0.05
PUSHED = 8
N_STEPS = 200


def rows() -> list[Row]:
    """Measure bytes, time and memory of snapshots."""
    cartpole = f"{SIZE:,} rows of 4 floats"
    frames = f"{SIZE_FRAMES:,} rows of a frame"
    once = {"store_next_obs": False, "frame_stacks": ("obs",)}
    return [
        *measured(cartpole, TensorBuffer(SIZE, seed=0), narrow_rows, AT_MOST),
        *measured(frames, TensorBuffer(SIZE_FRAMES, seed=0, **once), frame_rows, AT_MOST),
        *measured(
            f"{cartpole}, 3-step returns and priorities",
            TensorBuffer(SIZE, n_step=3, discount=0.99, sampler=PrioritySampler(), seed=0),
            narrow_rows,
            None,
        ),
    ]


def narrow_rows(first: int, n: int, rng: np.random.Generator) -> dict[str, Any]:
    """Return rows of eight envs that are stepped together, with episodes of 100 steps."""
    steps = n // PUSHED
    step = first // PUSHED + np.arange(steps)[:, None] + np.zeros((1, PUSHED), np.int64)
    at = first // PUSHED + np.arange(steps + 1)[:, None, None]
    obs = np.sin(at * np.arange(1.0, 4 * PUSHED + 1).reshape(PUSHED, 4)).astype(np.float32)
    done = step % 100 == 99
    return {
        "obs": obs[:-1],
        "action": rng.integers(2, size=(steps, PUSHED)),
        "reward": np.ones((steps, PUSHED), np.float32),
        "next_obs": obs[1:],
        "done": done,
        "terminated": done,
        "truncated": np.zeros_like(done),
        "episode_id": step // 100 * PUSHED + np.arange(PUSHED),
    }


def frame_rows(first: int, n: int, rng: np.random.Generator) -> dict[str, Any]:
    """Return rows of one env with stacks of four frames."""
    step = first + np.arange(n)
    frames = rng.integers(0, 256, (n + 4, 84, 84), dtype=np.uint8)
    stacks = np.moveaxis(np.lib.stride_tricks.sliding_window_view(frames, 4, axis=0), -1, 1)
    return {
        "obs": np.ascontiguousarray(stacks[:-1]),
        "action": rng.integers(4, size=n),
        "reward": rng.random(n, np.float32),
        "next_obs": np.ascontiguousarray(stacks[1:]),
        "done": step % 200 == 199,
        "episode_id": step // 200,
    }


def measured(
    name: str,
    buffer: TensorBuffer,
    make_rows: Callable[[int, int, np.random.Generator], dict[str, Any]],
    at_most: float | None,
) -> list[Row]:
    """Fill a buffer, and save it after each further percent of its rows."""
    rng = np.random.default_rng(0)
    n_new, total = buffer.size // 100, 0

    def push(n: int) -> None:
        nonlocal total
        for _ in range(n // N_STEPS):  # as a collector does
            buffer.push(as_tree(make_rows(total, N_STEPS, rng)))
            total += N_STEPS

    with tempfile.TemporaryDirectory() as folder, Task(OnlineRLContext()) as task:
        snapshots = SnapshotSaver(Path(folder), keep=2, parts={"buffer": buffer})
        task.use(snapshots)
        push(buffer.size + buffer.size // 10)  # the oldest rows are gone
        task.run(max_step=1)
        saved = [save(task, snapshots, Path(folder))]
        for _ in range(N_SNAPSHOTS + 1):
            push(n_new)
            if isinstance(buffer.sampler, PrioritySampler):
                update(buffer, n_new // 4)
            task.run(max_step=1)
            saved.append(save(task, snapshots, Path(folder)))
        peak = peak_of(lambda: snapshots.save(task))
    (full_bytes, full_s), _, *later = saved
    worst = max(size for size, _ in later)
    median_s = statistics.median(duration for _, duration in later)
    what = f"a snapshot after {n_new:,} new rows, {name}"
    return [
        Row(
            name=f"bytes of {what}",
            against="a full snapshot",
            ours=worst,
            reference=full_bytes,
            ratio=worst / full_bytes,
            unit="bytes",
            at_most=at_most,
        ),
        Row(
            name=f"duration of {what}",
            against="a full snapshot",
            ours=median_s * 1000,
            reference=full_s * 1000,
            ratio=median_s / full_s,
            unit="ms",
        ),
        Row(
            name=f"memory that saving takes, {name}",
            against="the buffer",
            ours=peak / 2**20,
            reference=buffer.nbytes / 2**20,
            ratio=peak / buffer.nbytes,
            unit="MiB",
            at_most=0.5,
        ),
    ]


def update(buffer: TensorBuffer, n: int) -> None:
    """Set the priorities of ``n`` batches of 64 rows."""
    for _ in range(n):
        buffer.update_priority(buffer.sample(64)["index"], torch.rand(64))


def save(task: Task[Any], snapshots: SnapshotSaver, folder: Path) -> tuple[int, float]:
    """Save a snapshot; return the bytes that it has written, and the seconds that it took."""
    before = written(folder)
    start = time.perf_counter()
    snapshots.save(task)
    duration_s = time.perf_counter() - start
    after = written(folder)
    return sum(size for (path, at), size in after.items() if (path, at) not in before), duration_s


def written(folder: Path) -> dict[tuple[Path, int], int]:
    """Return the sizes of the files below a folder, by their paths and times."""
    stats = {path: path.stat() for path in folder.rglob("*") if path.is_file()}
    return {(path, one.st_mtime_ns): one.st_size for path, one in stats.items()}


def peak_of(save: Callable[[], Any]) -> int:
    """Return the most memory that a call takes at any moment, in bytes."""
    tracemalloc.start()
    try:
        save()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
