"""A check for chains of one's own: a run that is stopped and resumed equals one that was not."""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, Final
from unittest import mock

import numpy as np
import torch
from annotated_types import Ge

from dmiddleware.data import load_checkpoint
from dmiddleware.pipeline import Task
from dmiddleware.settings import checked
from dmiddleware.tree import Batch, items_of

__all__ = ["assert_resume_exact"]

_TIMES: Final = ("time_s", "train_s", "elapsed_s", "crc32", "bytes")
"""Entries of a state that measure time, which no run repeats, and the position in the file of the
metrics, whose rows have times."""
_GENERATOR: Final = "bit_generator"


def assert_resume_exact(
    main: Callable[[Path], tuple[Task[Any], Any]],
    *,
    n_step: int = 6,
    stop_after: Iterable[int] | None = None,
    ignore: Sequence[str] = _TIMES,
) -> None:
    """Assert that a chain which is stopped and resumed ends as one that was never stopped.

    The chain runs ``n_step`` steps as a whole, twice, and again with a stop after some of them: a
    new chain continues from the snapshot. At the end, everything in the snapshots must be equal,
    bit for bit: the context, policies, buffers, envs, middleware and random generators::

        def main(folder: Path) -> tuple[Task, SnapshotSaver]:
            policy = DQNPolicy.for_env(...)
            task, snapshots = Task(seed=0), SnapshotSaver(folder)
            task.use(...).use(snapshots)
            return task, snapshots

        assert_resume_exact(main)

    Args:
        main: takes an empty folder, or that of the run to continue, and returns a new task with its
            chain, and the :class:`~middleware.SnapshotSaver` in it. Everything random is seeded in
            it, and it neither runs nor resumes the task.
        n_step: steps of the whole run.
        stop_after: the steps after which the run is stopped; None: 1, the middle, and the last but
            one.
        ignore: entries of states that may differ, by their last name.

    Raises:
        AssertionError: naming the first thing that differs, with both values; also if two runs that
            were never stopped differ.
        ConfigError: if there are fewer than two steps.
    """
    n_step = checked("n_step", n_step, Annotated[int, Ge(2)])
    stops = {1, n_step // 2, n_step - 1} if stop_after is None else set(stop_after)
    with TemporaryDirectory() as root:

        def end(*parts: int) -> dict[str, Any]:
            return _ended(main, Path(root, "run"), parts, ignore)

        expected = end(n_step)
        unseeded = _differences(expected, end(n_step))
        for name, (first, second) in unseeded.items():
            # A space of an env may have a generator that nothing draws from.
            assert _GENERATOR in str(first) and _GENERATOR in str(second), (
                f"two runs that were never stopped differ in {name}: {first!s:.200} and "
                f"{second!s:.200}; seed everything random in main"
            )
        for stop in sorted(stops):
            for name, (before, after) in _differences(expected, end(stop, n_step - stop)).items():
                assert name in unseeded, (
                    f"stopped after step {stop} and resumed, the run differs in {name}: "
                    f"{before!s:.200} without the stop, {after!s:.200} with it. Save it in the "
                    "state_dict() of the middleware that has it, or pass the object to "
                    "SnapshotSaver as one of its parts"
                )


def _ended(
    main: Callable[[Path], tuple[Task[Any], Any]],
    folder: Path,
    parts: Sequence[int],
    ignore: Sequence[str],
) -> dict[str, Any]:
    """Return everything in the last snapshot of a run that is resumed between its parts."""
    # Otherwise the ids of the episodes of two runs differ, whatever the seeds.
    with mock.patch.object(secrets, "randbits", lambda _: 7):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        for number, n_step in enumerate(parts):
            task, snapshots = main(folder)
            with task:
                if number:
                    assert snapshots.resume(task), "the stopped run has left no snapshot"
                task.run(max_step=n_step)
                path = snapshots.save(task)
        state = load_checkpoint(path)
    return {
        name: value for name, value in _values(state, "") if name.rpartition(".")[2] not in ignore
    }


def _differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return what differs, in order."""
    pairs = {
        name: (one.get(name, "nothing"), other.get(name, "nothing"))
        for name in dict.fromkeys((*one, *other))
    }
    return {name: pair for name, pair in pairs.items() if not _is_equal(*pair)}


def _values(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield each value of nested containers with its dotted path."""
    if isinstance(value, Batch | Mapping) and value:
        for key, item in items_of(value):
            yield from _values(item, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list | tuple) and any(
        isinstance(item, torch.Tensor | np.ndarray | Batch | Mapping | list | tuple)
        for item in value
    ):
        for index, item in enumerate(value):
            yield from _values(item, f"{name}.{index}")
    else:
        yield name, value


def _is_equal(first: Any, second: Any) -> bool:
    if type(first) is not type(second):
        return False
    if isinstance(first, torch.Tensor):
        first, second = first.cpu().numpy(), second.cpu().numpy()
    if isinstance(first, np.ndarray):
        same_form = first.shape == second.shape and first.dtype == second.dtype
        return bool(same_form and first.tobytes() == second.tobytes())
    return bool(first == second or (first != first and second != second))
