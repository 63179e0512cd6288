"""Buffers.

A row holds obs, action, reward, next_obs and done. The reference for pushing and sampling is
written by hand: one preallocated numpy array per column, written and read with an index array
(`column[(at + arange(32)) % size] = rows`, `column[rng.integers(count, size=256)]`), from numpy
arrays to numpy arrays. Ours takes a treetensor of torch tensors, checks it, and returns one. Both
buffers are full. The prioritized reference is cpprb's PrioritizedReplayBuffer, written in C++.
Stacks of frames are four of 84x84 bytes, in episodes of 200 steps; the reference is a TensorBuffer
that stores every stack and its successor.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from dmiddleware.data import PrioritySampler, TensorBuffer, as_tree
from tests.benchmarks.report import Row, interleaved, repeated

SIZE = 100_000
SIZE_WIDE = 20_000
PUSHED = 32
SAMPLED = 256
SIZE_STACKS = 8_000
EPISODE = 200
REPEATS = 41


def rows() -> list[Row]:
    """Measure pushing and sampling of narrow and wide rows, and prioritized replay."""
    found: list[Row] = []
    for width, size, calls, at_most in ((4, SIZE, 20, 1.5), (7_056, SIZE_WIDE, 2, 1.15)):
        push, sample = against_numpy(width, size)
        label = f"rows of {width:,} floats"
        push_pair = interleaved(*push, calls=calls, repeats=REPEATS, warmup=3)
        sample_pair = interleaved(*sample, calls=calls, repeats=REPEATS, warmup=3)
        found.append(
            Row.of_rate(
                f"push of {PUSHED}, {label}",
                push_pair,
                count=calls * PUSHED,
                unit="rows/s",
                against="numpy arrays",
                at_least=0.5,
            )
        )
        found.append(
            Row.of_time(
                f"sample of {SAMPLED}, {label}",
                sample_pair,
                calls=calls,
                against="numpy arrays",
                at_most=at_most,
            )
        )
    found.append(prioritized(calls=5))
    found.append(several_updates(n_updates=5, batch_size=64, calls=20))
    return found + frame_stacks()


Pair = tuple[Callable[[], Any], Callable[[], Any]]


def columns(n: int, width: int) -> dict[str, np.ndarray[Any, Any]]:
    rng = np.random.default_rng(0)
    return {
        "obs": rng.random((n, width), np.float32),
        "action": rng.integers(2, size=n),
        "reward": rng.random(n, np.float32),
        "next_obs": rng.random((n, width), np.float32),
        "done": rng.random(n) < 0.05,
    }


def against_numpy(width: int, size: int) -> tuple[Pair, Pair]:
    """Return (ours, reference) for pushing, and for sampling."""
    arrays = columns(size, width)
    buffer = TensorBuffer(size, seed=0)
    buffer.push(as_tree(arrays))
    new = columns(PUSHED, width)
    batch = as_tree(new)
    rng = np.random.default_rng(0)
    at = 0

    def push_reference() -> None:
        nonlocal at
        index = (at + np.arange(PUSHED)) % size
        for name, array in arrays.items():
            array[index] = new[name]
        at = (at + PUSHED) % size

    def sample_reference() -> dict[str, np.ndarray[Any, Any]]:
        index = rng.integers(size, size=SAMPLED)
        return {name: array[index] for name, array in arrays.items()}

    return (
        (lambda: buffer.push(batch), push_reference),
        (lambda: buffer.sample(SAMPLED), sample_reference),
    )


def several_updates(n_updates: int, batch_size: int, calls: int) -> Row:
    """Measure drawing the batches of several updates with one copy."""
    arrays = columns(SIZE, 4) | {"episode_id": np.zeros(SIZE, np.int64)}
    buffer = TensorBuffer(SIZE, n_step=3, discount=0.99, seed=0)
    buffer.push(as_tree(arrays))

    single = repeated(lambda: buffer.sample(batch_size), n_updates)
    pair = (lambda: buffer.sample_ahead(batch_size, at_most=n_updates), single)
    return Row.of_time(
        f"{n_updates} samples of {batch_size} with 3-step returns, one copy",
        interleaved(*pair, calls=calls, repeats=REPEATS, warmup=3),
        calls=calls,
        against="one by one",
        at_most=1.0,
    )


def frame_stacks() -> list[Row]:
    """Measure the memory of stacks whose frames are stored once, and sampling them."""
    once = TensorBuffer(SIZE_STACKS, frame_stacks=("obs",), store_next_obs=False, seed=0)
    full = TensorBuffer(SIZE_STACKS, seed=0)
    rng = np.random.default_rng(0)
    for episode in range(SIZE_STACKS // EPISODE + 5):  # some rows are overwritten
        frames = rng.integers(0, 256, (EPISODE + 4, 84, 84), dtype=np.uint8)
        stacks = np.lib.stride_tricks.sliding_window_view(frames, 4, axis=0)
        stacks = np.ascontiguousarray(np.moveaxis(stacks, -1, 1))
        batch = as_tree(
            {
                "obs": stacks[:-1],
                "action": rng.integers(4, size=EPISODE),
                "reward": rng.random(EPISODE, np.float32),
                "next_obs": stacks[1:],
                "done": np.arange(EPISODE) == EPISODE - 1,
                "episode_id": np.full(EPISODE, episode),
            }
        )
        once.push(batch)
        full.push(batch)
    ours, reference = once.nbytes / SIZE_STACKS, full.nbytes / SIZE_STACKS
    sample = interleaved(lambda: once.sample(32), lambda: full.sample(32), repeats=REPEATS)
    return [
        Row(
            name="memory of a row of 4x84x84 bytes, frames stored once",
            against="stored stacks",
            ours=ours,
            reference=reference,
            ratio=ours / reference,
            unit="bytes",
            at_most=8_000 / reference,
            note=f"1,000,000 rows: {ours / 1000:.2f} GB instead of {reference / 1000:.1f} GB",
        ),
        Row.of_time("sample of 32 stacks", sample, calls=1, against="stored stacks", at_most=1.5),
    ]


def prioritized(calls: int) -> Row:
    """Measure sampling 256 of 100,000 rows by priority and updating these priorities."""
    name = f"prioritized: sample {SAMPLED} + update {SAMPLED} of {SIZE:,}"
    if importlib.util.find_spec("cpprb") is None:
        return Row.missing(name, against="cpprb", note="cpprb is not installed")
    import cpprb

    stored = columns(SIZE, 4)
    priority = np.random.default_rng(1).random(SIZE)
    new_priority = np.random.default_rng(2).random(SAMPLED).astype(np.float32)
    theirs = cpprb.PrioritizedReplayBuffer(
        SIZE,
        {
            "obs": {"shape": 4},
            "action": {"dtype": np.int64},
            "reward": {},
            "next_obs": {"shape": 4},
            "done": {"dtype": bool},
        },
        alpha=0.6,
    )
    theirs.add(**stored)
    theirs.update_priorities(np.arange(SIZE), priority)
    ours = TensorBuffer(SIZE, sampler=PrioritySampler(alpha=0.6, beta=0.4), seed=0)
    ours.push(as_tree(stored))
    ours.update_priority(np.arange(SIZE), priority)
    as_tensor = torch.from_numpy(new_priority)

    def run_ours() -> None:
        batch = ours.sample(SAMPLED)
        ours.update_priority(batch["index"], as_tensor)

    def run_theirs() -> None:
        batch = theirs.sample(SAMPLED, beta=0.4)
        theirs.update_priorities(batch["indexes"], new_priority)

    pair = interleaved(run_ours, run_theirs, calls=calls, repeats=REPEATS, warmup=3)
    return Row.of_time(name, pair, calls=calls, against="cpprb", at_most=1.0)
