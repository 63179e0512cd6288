"""Snapshots: a whole run on disk, to go on from as if it had never stopped."""

from __future__ import annotations

import logging
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
import torch

from dmiddleware.data import load_checkpoint, save_checkpoint
from dmiddleware.env import BaseEnvManager
from dmiddleware.errors import CheckpointDamaged, CheckpointMismatch
from dmiddleware.pipeline import Role, Task
from middleware.run_folder import RunFolder
from middleware.support.checks import check_positive

__all__ = ["SnapshotSaver"]

_PATTERN: Final = "step_*.safetensors"

_log = logging.getLogger(__name__)


class Stateful(Protocol):
    """What has a state: policies' learn modes, learners, buffers, env managers."""

    def state_dict(self) -> Any:
        """Return the state."""

    def load_state_dict(self, state: Any) -> object:
        """Go on from a state."""


class SnapshotSaver:
    """Save the whole run now and then, and when it stops, to go on from there.

    A snapshot holds the context, the state of every middleware that has one (collectors with their
    envs and unfinished episodes among them), the parts that are named here, and the global random
    generators. A run that is stopped and resumed equals one that was never stopped, as far as the
    envs' states can be saved; where they cannot, their episodes begin anew.

    The files lie in the run's folder ``snapshots``, the newest few of them. Each is written whole
    or not at all, with a checksum, and loading one executes no code. When a run goes back to an
    older one, its next snapshot takes the place of those that it went back from.

    Build the same chain as the run that was stopped, call :meth:`resume`, and run it::

        parts = {"learner": learner, "buffer": buffer, "eval_env": eval_env}
        snapshots = SnapshotSaver(run, parts, every_train_iter=1000)
        task.use(snapshots)
        snapshots.resume(task)
        task.run()

    Its place in the chain does not matter. Of several processes the learner saves.

    Args:
        run: in whose folder the snapshots lie.
        parts: what else belongs to the run, by name: the learner (or the policy's learn mode), the
            buffer, the evaluator's env manager.
        every_train_iter: updates from one snapshot to the next; None: only when the run stops.
        keep: how many to keep.

    Reads:
        ctx.train_iter: updates so far.

    Raises:
        ValueError: if ``every_train_iter`` or ``keep`` is not positive.
        CheckpointWriteError: if a file cannot be written; those before it are intact.
    """

    roles = (Role.LEARNER,)
    reads = ("train_iter",)

    def __init__(
        self,
        run: RunFolder | Path,
        parts: Mapping[str, Stateful],
        *,
        every_train_iter: int | None = None,
        keep: int = 2,
    ) -> None:
        check_positive(every_train_iter=every_train_iter, keep=keep)
        self._folder = (run.path if isinstance(run, RunFolder) else run) / "snapshots"
        self._parts = dict(parts)
        self._every = every_train_iter
        self._keep = keep
        self._saved_iter = 0

    @property
    def paths(self) -> list[Path]:
        """The snapshots there are, the newest first."""
        return sorted(self._folder.glob(_PATTERN), reverse=True)

    def setup(self, task: Task[Any]) -> None:
        """Count from where the run begins, and look at the end of each step."""
        self._saved_iter = task.ctx.train_iter
        task.at_step_end(lambda: self._end_step(task))

    def __call__(self, ctx: Any) -> None:
        """Do nothing: a snapshot is taken between two steps."""

    def save(self, task: Task[Any]) -> Path:
        """Save the run as it is between two steps.

        Returns:
            The snapshot's file.

        Raises:
            CheckpointWriteError: if it cannot be written; the snapshots before it are intact.
        """
        path = self._folder / f"step_{task.ctx.total_step:012d}.safetensors"
        state = {
            "task": task.state_dict(),
            "parts": {name: part.state_dict() for name, part in self._parts.items()},
            "random": _random_state(),
        }
        save_checkpoint(path, state)
        _log.info("saved %s", path)
        self._remove_others(path)
        return path

    def resume(self, task: Task[Any], path: Path | None = None) -> bool:
        """Go on from a snapshot, before the first step.

        Args:
            task: with the same chain as the one that was saved.
            path: the snapshot; None: the newest that is whole, in the run's folder.

        Returns:
            Whether there was one.

        Raises:
            CheckpointDamaged: if ``path`` is given, and is no whole snapshot.
            CheckpointMismatch: if the snapshot is that of another chain, or has other parts.
        """
        if not any(task.has_role(role) for role in self.roles):
            return False
        found = _read(path) if path is not None else self._newest()
        if found is None:
            return False
        saved = found["parts"]
        if saved.keys() != self._parts.keys():
            raise CheckpointMismatch(
                f"the snapshot has the parts {', '.join(sorted(saved)) or 'none'}, and "
                f"{', '.join(sorted(self._parts)) or 'none'} were named; name the same ones"
            )
        # What the middleware tell others when they are set up must be that of the snapshot. Env
        # managers are launched in that set-up, and can be restored only then.
        envs = {name for name, part in self._parts.items() if isinstance(part, BaseEnvManager)}
        for name in self._parts.keys() - envs:
            self._parts[name].load_state_dict(saved[name])
        task.ctx.load_state_dict(found["task"]["context"])
        task.load_state_dict(found["task"])
        for name in envs:
            self._parts[name].load_state_dict(saved[name])
        _set_random_state(found["random"])
        self._saved_iter = task.ctx.train_iter
        _log.info("resumed at step %d, update %d", task.ctx.total_step, task.ctx.train_iter)
        return True

    def _end_step(self, task: Task[Any]) -> None:
        """Save if it is time, or if this step was the last one.

        Not on the step's way back: a stop may come after it, or cut the step short before it.
        """
        if task.finish:
            self.save(task)
            return
        task.at_step_end(lambda: self._end_step(task))
        if self._every is not None and task.ctx.train_iter - self._saved_iter >= self._every:
            self._saved_iter = task.ctx.train_iter
            self.save(task)

    def _remove_others(self, saved: Path) -> None:
        """Keep the newest few; later steps than the saved one are a course that the run has left.

        It went back to an older snapshot, because those were damaged, say.
        """
        left = [path for path in self.paths if path > saved]
        if left:
            _log.info("removed %s: the run went back from there", ", ".join(p.name for p in left))
        old = [path for path in self.paths if path < saved][self._keep - 1 :]
        for path in left + old:
            path.unlink(missing_ok=True)

    def _newest(self) -> Any:
        for path in self.paths:
            try:
                return _read(path)
            except CheckpointDamaged as error:
                _log.warning("%s; the one before it is used", error)
        return None


def _read(path: Path) -> Any:
    state = load_checkpoint(path)
    if not isinstance(state, Mapping) or not {"task", "parts", "random"} <= state.keys():
        raise CheckpointDamaged(f"{path} is a checkpoint, but not a snapshot of a run")
    return state


def _random_state() -> dict[str, Any]:
    version, numbers, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "python": [version, list(numbers), gauss],
        "numpy": [name, keys, position, has_gauss, cached],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def _set_random_state(state: Mapping[str, Any]) -> None:
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, np.asarray(keys), position, has_gauss, cached))
    torch.set_rng_state(state["torch"])
    if torch.cuda.is_available():
        # There may be fewer devices here than where the snapshot was saved.
        for device, drawn in zip(range(torch.cuda.device_count()), state["cuda"], strict=False):
            torch.cuda.set_rng_state(drawn, device)
