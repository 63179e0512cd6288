"""Snapshots of a whole run, to resume it as if it had never stopped."""

from __future__ import annotations

import dataclasses
import logging
import math
import random
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from dmiddleware.best_effort import BestEffort
from dmiddleware.data import BlockFolder, check_saveable, load_checkpoint, save_checkpoint
from dmiddleware.distributed import gather_from_ranks, rank_and_world_size, sum_over_ranks
from dmiddleware.env import BaseEnvManager
from dmiddleware.errors import (
    CheckpointDamaged,
    CheckpointMismatch,
    CheckpointWriteError,
    ConfigError,
    RunFolderError,
)
from dmiddleware.files.state_blocks import blocks_of
from dmiddleware.pipeline import ChainView, Stateful, Task, current_node, middleware_name
from dmiddleware.runs.resuming import SNAPSHOTS, resumed_folder
from dmiddleware.settings import Count, TakesSettings, takes_options
from middleware.base import BaseMiddleware, stock_middleware
from middleware.context import RLContext
from middleware.record.folder_lock import RunLock, check_writable
from middleware.record.run_folder import RunFolder, check_run_folder
from middleware.roles import Role
from middleware.support.interval import Interval, IntervalSettings

__all__ = ["SnapshotSaver", "SnapshotSaverSettings"]

_DIGITS: Final = 12
_EVERY: Final = {"online": 2000, "offline": 1000}
"""Env steps, or updates, from one snapshot to the next if the program gives no interval."""
_LEAST_WORK: Final = 50.0
"""Without an interval, the run works at least this many times as long as the last save took."""
_LARGE: Final = 1 << 24
"""Tensors of more bytes, such as the rows of a buffer, are read from the file as they are used."""
_BLOCKS: Final = ("blocks-a", "blocks-b")
"""The folders of blocks. Snapshots in a row use different ones, so that no file belongs to both."""

_log = logging.getLogger(__name__)


class SnapshotSaverSettings(IntervalSettings):
    """The options of :class:`SnapshotSaver`."""

    every_train_iter: Count | None = None
    """Updates from one snapshot to the next; offline, without an interval: 1000, or more if saving
    takes over 2% of the time."""
    every_env_step: Count | None = None
    """Env steps from one snapshot to the next; without an interval: 2000, or more if saving takes
    over 2% of the time."""
    keep: Count = 2
    """How many to keep."""
    parts: Mapping[str, Any] = dataclasses.field(default_factory=dict, repr=False)
    """Further objects to save, by name, that no stock middleware of the chain uses."""


class SnapshotSaver(BaseMiddleware[RLContext], TakesSettings[SnapshotSaverSettings]):
    """Save the whole run at intervals and when it stops, to resume it later.

    A snapshot has the context, the state of every middleware of the chain, the policies, learners,
    buffers and envs that the stock middleware of the chain use, and the global random generators. A
    run that is stopped and resumed equals one that was never stopped, as far as the states of the
    envs can be saved; where they cannot, their episodes restart.

    Without an interval, it saves every 2,000 env steps, or every 1,000 updates if the chain counts
    no env steps. It leaves out some of them where saving would take more than 2% of the time.

    The files are in the run's folder ``snapshots``; the last few are kept. Each is written
    completely or not at all, with a checksum, and loading one executes no code. When a run resumes
    from an older snapshot, its next snapshot replaces the ones that it did not use.

    The rows of a buffer are in blocks, in files of their own, which a snapshot shares with the last
    but one: it writes only the blocks that have changed since then. It shares no file with the one
    directly before it, so a file that is damaged on the disk leaves one of the two.

    Build the same chain as in the stopped run, call :meth:`resume`, and run it::

        snapshots = SnapshotSaver(run, every_train_iter=1000)
        task.use(snapshots)
        snapshots.resume(task)
        task.run()

    The position in the chain does not matter. In a run of several processes the learner saves. Its
    snapshot can also be resumed by one process, by any number of collectors, and the other way
    round: what another process held, such as the envs of collectors, begins from scratch. If
    several ranks learn, each saves its own state, because each has its own buffer, envs and random
    generators: rank 0 to ``step_<n>.safetensors``, rank 1 to ``step_<n>.rank-1.safetensors``, and
    so on. They resume from the newest step of which all of them have an undamaged file. All ranks
    save and resume together.

    A process that learns a named part of the chain alone, ``learner:red``, saves its own state to
    the folder ``snapshots/red``, and resumes from its newest snapshot there. Its steps are its own,
    so it saves and resumes by itself. Such a run resumes with the same learners.

    Args:
        run: the folder to save to.
        settings: the options, each by keyword; see :class:`SnapshotSaverSettings`.

    Reads:
        ctx.train_iter, ctx.env_step: updates and env steps so far, in this process.

    Raises:
        ConfigError: if ``run`` is not a folder, an option is not valid, or a part has no state.
        ChainError: before the first step, if the state of a part or a middleware cannot be saved.
        CheckpointWriteError: if a file cannot be written; the snapshots before it are intact.
        RunFolderError: if another task trains in the folder, or the folder was deleted.
    """

    roles = (Role.LEARNER,)
    with_parts = True
    reads = ("train_iter",)

    settings: SnapshotSaverSettings

    @takes_options(SnapshotSaverSettings)
    def __init__(self, run: RunFolder | Path, settings: SnapshotSaverSettings) -> None:
        self._run = RunFolder(run) if isinstance(run, Path) else run
        self._folder = check_run_folder(self._run, user="SnapshotSaver").path / SNAPSHOTS
        self._lock: RunLock | None = None
        self._learned: tuple[str, ...] = ()
        self._tidying = BestEffort(f"remove old snapshots in {self._folder}")
        self._further: dict[str, Stateful] = dict(settings.parts)
        for name, part in self._further.items():
            if not isinstance(part, Stateful):
                raise ConfigError(
                    f"SnapshotSaver cannot save the part {name!r}: {part!r:.100} has no "
                    "state_dict() and load_state_dict(); give it both, or leave it out"
                )
        self._parts: dict[str, Stateful] = dict(self._further)
        self._silent: list[str] = []
        self.settings = settings
        self._interval = Interval(settings, **_EVERY)
        self._not_before = -math.inf
        self._blocks: dict[str, BlockFolder] = {}
        self._last: Path | None = None  # that was saved or resumed
        self._is_checked = False
        self._was_asked = False
        self.owns = (self._folder,)

    @property
    def paths(self) -> list[Path]:
        """The snapshots of this rank in the folder, the newest first."""
        return sorted(self._folder.glob(self._name("[0-9]" * _DIGITS)), reverse=True)

    def _name(self, step: str) -> str:
        return _part_of_rank(Path(f"step_{step}.safetensors")).name

    def bind(self, chain: ChainView) -> None:
        """Find what the chain's middleware use."""
        parts, used = self._parts_of(chain)
        self._parts = {name: part for name, part in parts.items() if name in used}
        self._silent = sorted(parts.keys() - used)

    def preflight(self, chain: ChainView) -> Iterable[str]:
        """Reject what cannot be saved."""
        yield from self._interval.preflight(chain)
        parts, used = self._parts_of(chain)
        saved = {name: part for name, part in parts.items() if name in used}
        for name, part in saved.items():
            if not isinstance(part, Stateful):
                yield f"it cannot save {name}, which has no state_dict()"
        yield from _unsaveable(saved, chain.whole)

    def _parts_of(self, chain: ChainView) -> tuple[dict[str, Any], set[str]]:
        """Return all parts by name, and the names of those in use in the roles of this process.

        A part has the same name in all processes, whatever their roles.
        """
        chain = chain.whole
        parts: dict[str, Any] = dict(self._further)
        used = set(parts)
        names: Counter[str] = Counter()
        for component in stock_middleware(chain):
            is_active = any(component is active for active in chain.active)
            for name, part in component.snapshot_parts.items():
                of_part = "" if component.part_name is None else f":{component.part_name}"
                path = f"{middleware_name(component)}{of_part}.{name}"
                # Modes are new objects each time, but compare equal.
                key = next(
                    (
                        k
                        for k, part_saved in parts.items()
                        if part is part_saved or part == part_saved
                    ),
                    "",
                )
                if not key:
                    names[path] += 1
                    key = path if names[path] == 1 else f"{path}#{names[path]}"
                    parts[key] = part
                if is_active:
                    used.add(key)
        return parts, used

    def setup(self, task: Task[Any]) -> None:
        """Count updates from here, and save at the end of steps.

        Raises:
            RunFolderError: if the folder is in use by another task, or cannot be written to.
            ConfigError: if ``ditask resume`` continues the run, and the program does not.
        """
        if resumed_folder() is not None and not self._was_asked:
            raise ConfigError(
                "ditask resume continues this run, but the program never calls "
                "SnapshotSaver.resume(task); call it before task.run(), also in new runs"
            )
        self._begin(task)
        check_writable(self._folder)
        self._interval.start(task.ctx)
        self._is_checked = False
        task.at_step_end(lambda: self._end_step(task))

    def _begin(self, task: Task[Any]) -> RunLock:
        """Lock the run's folder, and find that of the snapshots of this process."""
        self._learned = _learned_parts(task)
        if self._learned and not task.has_role(Role.LEARNER):
            self._folder = self._run.path / SNAPSHOTS / self._learned[0]
        self._lock = self._run.lock(task)
        return self._lock

    def __call__(self, ctx: RLContext) -> None:
        """Check in the first step what only exists after the set-up of the middleware.

        Raises:
            ConfigError: if the state of a middleware cannot be saved.
        """
        if self._is_checked:
            return
        self._is_checked = True
        for name, state in ctx.task.state_dict()["middleware"].items():
            for problem in _problems_of(f"the state of the middleware {name}", state):
                raise ConfigError(f"SnapshotSaver: {problem}")

    def save(self, task: Task[Any]) -> Path:
        """Save the run as it is between two steps.

        Returns:
            The path of the snapshot.

        Raises:
            CheckpointWriteError: if it cannot be written; the snapshots before it are intact.
            RunFolderError: if the folder is in use by another task, or was deleted.
        """
        lock = self._begin(task) if self._lock is None else self._lock
        lock.check()
        started_at = task.clock.now()
        path = self._folder / self._name(f"{task.ctx.total_step:0{_DIGITS}d}")
        with ExitStack() as stack:
            parts = {name: stack.enter_context(_state_of(p)) for name, p in self._parts.items()}
            state = {
                "run": _run_id(),
                "ranks": rank_and_world_size()[1],
                "learned": list(self._learned),
                "task": task.state_dict(),
                "parts": parts,
                "silent": self._silent,
                "roles": sorted(map(str, task.roles)),
                "random": _random_state(),
            }
            try:
                save_checkpoint(path, state, blocks=self._next_blocks())
            except CheckpointWriteError:
                self._remove_unused_blocks()
                raise
        self._last = path
        _log.info("saved %s", path)
        # Before all ranks have saved, the earlier snapshots are the newest complete ones.
        gather_from_ranks(path.name)
        self._remove_others(path)
        now = task.clock.now()
        self._not_before = now + _LEAST_WORK * (now - started_at)
        return path

    def resume(self, task: Task[Any], path: Path | None = None) -> bool:
        """Restore a snapshot, before the first step.

        Args:
            task: a task with the same chain as the saved task.
            path: the snapshot; None: the newest undamaged one in the run's folder.

        Returns:
            Whether there was one. Without any, the run starts; one whose snapshots cannot be read
            does not, because it would replace what the earlier one has left in its folder.

        Raises:
            ChainError: if the chain cannot run.
            CheckpointDamaged: if ``path`` is not an undamaged snapshot.
            CheckpointMismatch: if the snapshot is from another chain, has other parts, or was saved
                by another number of ranks, or by a process that learned other named parts.
            RunFolderError: if the folder is in use by another task, or cannot be written to; if it
                has snapshots, but none can be read; if it has none, and ``ditask resume`` continues
                the run; or if another job has finished the run, as far as the jobs are known.
        """
        self._was_asked = True
        was_stopped = task.finish
        if not task.has_role(Role.LEARNER) and not _learned_parts(task):
            return False
        self._begin(task)
        if path is not None:
            self._last = _part_of_rank(path)
            state = _read(self._last)
        else:
            state = self._newest()
        if state is None:
            if resumed_folder() is not None:
                raise RunFolderError(f"{self._folder} has no snapshot to continue from")
            return False
        _check_ranks(state.get("ranks", 1))
        _check_learned(state.get("learned", self._learned), self._learned)
        task.check()
        self.bind(task.chain)
        saved = state["parts"]
        self._check_parts(saved.keys(), state.get("silent", ()))
        # The setup of a middleware may publish what it finds, such as weights, so they come first.
        # The state of env managers can be restored only after setup, which launches them.
        envs = {name for name, part in self._parts.items() if isinstance(part, BaseEnvManager)}
        for name in (self._parts.keys() & saved.keys()) - envs:
            self._restore(name, saved[name])
        task.ctx.load_state_dict(state["task"]["context"])
        try:
            task.load_state_dict(state["task"])
        except CheckpointMismatch as error:
            if (roles := state.get("roles")) is not None and set(roles) != set(task.roles):
                error.add_note(_other_roles(roles, task))
            raise
        for name in envs & saved.keys():
            self._restore(name, saved[name])
        _set_random_state(state["random"])
        if task.finish and not was_stopped and resumed_folder() is None:
            self._refuse_finished(state.get("run", ""))
        self._interval.start(task.ctx)
        _log.info("resumed at step %d, update %d", task.ctx.total_step, task.ctx.train_iter)
        return True

    def _end_step(self, task: Task[Any]) -> None:
        """Save if the interval has passed, or if this was the last step.

        This cannot happen on the step's way back, because a stop may come after it, or end the step
        before it.
        """
        if task.finish:
            self.save(task)
            return
        task.at_step_end(lambda: self._end_step(task))
        if self._interval.is_due(task.ctx) and self._is_cheap(task):
            self.save(task)

    def _is_cheap(self, task: Task[Any]) -> bool:
        """Return whether another save is cheap enough, on every rank; a given interval counts."""
        is_given = self.settings.every_train_iter or self.settings.every_env_step
        too_early = not is_given and task.clock.now() < self._not_before
        return sum_over_ranks([float(too_early)]) == [0.0]

    def _refuse_finished(self, other: str) -> None:
        """Refuse a run that nothing is left of, if a job with another name has finished it.

        It would end before the other hosts of this job have connected, which then wait in vain.
        """
        run = _run_id()
        if run and other and run != other:
            raise RunFolderError(
                f"{self._run.path} has a run that {other} has finished, and this is {run}; give "
                "this run a folder with another name, or resume=False, or raise its limits to "
                "continue that run"
            )

    def _restore(self, name: str, state: Any) -> None:
        try:
            self._parts[name].load_state_dict(state)
        except Exception as error:
            error.add_note(
                f"while {name} was being restored; build it with the options that it had when its "
                "state was saved"
            )
            raise

    def _check_parts(self, saved: Collection[str], silent: Collection[str]) -> None:
        """Refuse the parts of another chain; those of other roles begin from scratch.

        Raises:
            CheckpointMismatch: if they differ for another reason.
        """
        missing = sorted(self._parts.keys() - saved - set(silent))
        unused = sorted(set(saved) - self._parts.keys() - set(self._silent))
        if missing or unused:
            raise CheckpointMismatch(
                f"the snapshot has the parts {', '.join(sorted(saved)) or 'none'}, but this chain "
                f"has {', '.join(sorted(self._parts)) or 'none'}: "
                f"{_difference(missing, unused)}; build the same chain as the one that was saved"
            )

    def _remove_others(self, saved: Path) -> None:
        """Keep the newest few snapshots, and remove snapshots of later steps than the saved one.

        Later ones exist if the run resumed from an older snapshot, because they were damaged for
        example.
        """
        later = [path for path in self.paths if path > saved]
        if later:
            names = ", ".join(path.name for path in later)
            _log.info("removed %s, because the run resumed from an older snapshot", names)
        old = [path for path in self.paths if path < saved][self.settings.keep - 1 :]
        for path in later + old:
            with self._tidying:
                path.unlink(missing_ok=True)
        self._remove_unused_blocks()

    def _next_blocks(self) -> BlockFolder:
        """Return the folder for the next snapshot's blocks: not that of the last snapshot."""
        last = self._last or next(iter(self.paths), None)
        in_use = {name.partition("/")[0] for name in blocks_of(last)} if last else ()
        names = [_part_of_rank(Path(name)).name for name in _BLOCKS[: self.settings.keep]]
        name = next((folder for folder in names if folder not in in_use), names[0])
        return self._blocks.setdefault(name, BlockFolder(self._folder / name))

    def _remove_unused_blocks(self) -> None:
        for name in (_part_of_rank(Path(pattern)).name for pattern in _BLOCKS):
            with self._tidying:
                blocks = self._blocks.setdefault(name, BlockFolder(self._folder / name))
                blocks.keep_only(self.paths)

    def _newest(self) -> Any:
        """Return this rank's part of the newest snapshot that all ranks can read.

        Returns:
            The part; None if no rank has any snapshot, or the first one was interrupted.

        Raises:
            CheckpointMismatch: if another number of ranks has saved the snapshots.
            RunFolderError: if there are snapshots, but none that all ranks can read.
        """
        steps = [_step_of(path) for path in self.paths]
        of_ranks = gather_from_ranks(steps)
        problems: list[str] = []
        for step in steps:
            if all(step in others for others in of_ranks):
                self._last = self._folder / self._name(step)
                state = self._try_to_read(step, problems)
                if all(gather_from_ranks(state is not None)):
                    return state
        if not any(of_ranks):
            return None
        if len(of_ranks) > 1:
            newest = self._try_to_read(steps[0], problems) if steps else None
            for size in gather_from_ranks(None if newest is None else newest.get("ranks", 1)):
                _check_ranks(size)
        problems = [problem for some in gather_from_ranks(problems) for problem in some]
        if not problems and len({step for some in of_ranks for step in some}) == 1:
            _log.warning("%s has only a part of its first snapshot; starting", self._folder)
            return None
        details = "; ".join(dict.fromkeys(problems)) or "No step has a file of every rank"
        raise RunFolderError(
            f"{self._folder} has no snapshot that can be read. Restore one from a copy, or start a "
            f"new run in a folder of its own; to start over in this folder, remove {self._folder} "
            f"first. {details}"
        )

    def _try_to_read(self, step: str, problems: list[str]) -> Any:
        """Return this rank's part of a snapshot; None, and a problem more, if it cannot be read."""
        try:
            return _read(self._folder / self._name(step))
        except (CheckpointDamaged, OSError) as error:
            _log.warning("%s; trying the snapshot before it", error)
            problems.append(str(error))
            return None


def _run_id() -> str:
    """Return the name of this run; empty: it has none."""
    node = current_node()
    return "" if node is None else node.run_id


@contextmanager
def _state_of(part: Any) -> Iterator[Any]:
    """Give access to the state of a part; that of a buffer, without a copy of its rows."""
    if not hasattr(part, "live_state"):
        yield part.state_dict()
        return
    with part.live_state() as state:
        yield state


def _problems_of(name: str, state: object) -> Iterable[str]:
    try:
        check_saveable(state)
    except TypeError as error:
        yield f"it cannot save {name}: {error}"


def _read(path: Path) -> Any:
    state = load_checkpoint(path, mapped_above=_LARGE)
    if not isinstance(state, Mapping) or not {"task", "parts", "random"} <= state.keys():
        raise CheckpointDamaged(
            f"{path} is a checkpoint, but not a snapshot; pass a file of SnapshotSaver"
        )
    return state


def _part_of_rank(path: Path) -> Path:
    """Return the path of this rank's part of a snapshot, given the path of rank 0's."""
    rank = rank_and_world_size()[0]
    return path if rank == 0 else path.with_suffix(f".rank-{rank}{path.suffix}")


def _step_of(path: Path) -> str:
    return path.name.removeprefix("step_").partition(".")[0]


def _check_ranks(saved: int | None) -> None:
    size = rank_and_world_size()[1]
    if saved is not None and saved != size:
        raise CheckpointMismatch(
            f"the snapshot was saved by {saved} rank(s), but {size} run now; resume it with "
            f"{saved} (ditask --roles learner={saved},..., or torchrun --nproc-per-node {saved}), "
            "or load a checkpoint instead, which does not depend on their number"
        )


def _learned_parts(task: Task[Any]) -> tuple[str, ...]:
    """Return the named parts of the chain that learn in this process."""
    return tuple(name for name in task.chain.parts if task.part(name).has_role(Role.LEARNER))


def _check_learned(saved: Sequence[str], here: Sequence[str]) -> None:
    if list(saved) != list(here):
        raise CheckpointMismatch(
            f"the snapshot was saved by a process that learned {' and '.join(saved) or 'no part'}, "
            f"and this one learns {' and '.join(here) or 'none'}; resume it with the learners that "
            "it was saved by (ditask --roles learner:<name>=1 for each that had a process of its "
            "own), or load checkpoints instead, which do not depend on them"
        )


def _difference(missing: Sequence[str], left: Sequence[str]) -> str:
    return " and ".join(
        f"{difference} {', '.join(names)}"
        for difference, names in (("the snapshot lacks", missing), ("the chain lacks", left))
        if names
    )


def _unsaveable(parts: Mapping[str, Any], chain: ChainView) -> Iterable[str]:
    """Yield the problems of the states of parts, of the context and of the active middleware."""
    parts_by_name = {f"the part {name!r}": part for name, part in parts.items()}
    for name, part in {**parts_by_name, "the context": chain.context}.items():
        # An env manager has a state only after its launch.
        if isinstance(part, Stateful) and not isinstance(part, BaseEnvManager):
            with _state_of(part) as state:
                problems = list(_problems_of(name, state))
            yield from problems
    stateful = {id(part): part for part in chain.active if isinstance(part, Stateful)}
    for part in stateful.values():
        try:
            state = part.state_dict()
        except Exception:  # noqa: BLE001 (it may need its setup first; see __call__)
            continue
        yield from _problems_of(f"the state of the middleware {middleware_name(part)}", state)


def _other_roles(saved: Sequence[str], task: Task[Any]) -> str:
    """Return who has saved a snapshot, for an error, and how to resume it there."""
    if saved:
        before = f"a process with the roles {', '.join(saved)}"
        how = f"start it with ditask, as in --roles {','.join(f'{role}=1' for role in saved)},..."
    else:
        before, how = "a run of one process", "start it without ditask, as one process"
    now = ", ".join(sorted(map(str, task.roles))) or "all roles"
    return f"the snapshot was saved by {before}, and this process has {now}; to resume it, {how}"


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
        # This machine may have fewer devices than the one where the snapshot was saved.
        for device, drawn in zip(range(torch.cuda.device_count()), state["cuda"], strict=False):
            torch.cuda.set_rng_state(drawn, device)
