"""Checkpoints of the policy, during the run and at its end."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from dmiddleware.best_effort import BestEffort
from dmiddleware.data import load_checkpoint, save_checkpoint
from dmiddleware.errors import CheckpointWriteError, ConfigError, RunFolderError
from dmiddleware.pipeline import ChainView, Task
from dmiddleware.policy import HasModes, LearnMode, as_learn_mode
from dmiddleware.policy.policy_description import DESCRIPTION, describe_policy
from dmiddleware.settings import Count, TakesSettings, takes_options
from dmiddleware.tree import to_float
from middleware.base import BaseMiddleware
from middleware.context import OnlineRLContext, RLContext
from middleware.record.folder_lock import FolderLock, NoLock, RunLock, check_writable
from middleware.record.run_folder import RunFolder, check_run_folder
from middleware.roles import Role
from middleware.support.interval import Interval, IntervalSettings
from middleware.support.part_name import PartSettings

__all__ = ["CkptSaver", "CkptSaverSettings"]

_BEST: Final = "ckpt.best"

_log = logging.getLogger(__name__)


class CkptSaverSettings(IntervalSettings, PartSettings):
    """The options of :class:`CkptSaver`."""

    every_train_iter: Count | None = None
    """Updates from one periodic checkpoint to the next; None: no such checkpoints."""
    every_env_step: Count | None = None
    """Env steps from one periodic checkpoint to the next; None: no such checkpoints."""
    keep: Count = 3
    """How many periodic checkpoints to keep."""


class CkptSaver(BaseMiddleware[RLContext], TakesSettings[CkptSaverSettings]):
    """Save the policy after its best evaluation so far, at intervals, and at the end of the run.

    The folder ``ckpt`` of the run, or ``ckpt/red`` with ``name="red"``, gets these files:

    - ``best.safetensors``: the policy of the evaluation with the greatest finite value; of equal
      ones, the first. This is its whole state, with optimizer and counters. If the policy was
      evaluated in another process, or has learned since, it is only the parameters that were
      evaluated.
    - ``iteration_<n>.safetensors``: the whole state after ``n`` updates, for the last few ``n``.
      There are only such files if an interval is given.
    - ``final.safetensors``: the whole state at the end of the run, also if it ends with an error or
      a signal. A run that ends before its first update leaves the file of an earlier one in place.

    Each file is written completely or not at all. In addition to the policy's state it has
    ``last_iter`` and ``last_step``, like the files of a learner's ``SaveCkptHook``, and
    ``policy``, what :func:`~dmiddleware.load_policy` builds the policy from. The best one
    also has ``last_eval_value``: a learner that is restarted in the same folder replaces it only by
    a better one.

    Given a path in place of a run's folder, it writes only the periodic files, to that folder, as
    ``step_<n>.safetensors`` after ``n`` env steps (offline: as above). This is for programs with an
    :class:`~middleware.Experiment`, which saves the best and the last policy itself::

        task.use(CkptSaver(policy, experiment.run.path / "periodic", every_env_step=10_000, keep=5))

    When ``best.safetensors`` has been written, the event ``"ckpt.best"`` is emitted in this process
    with the path of the file and the mean return.

    The position in the chain does not matter, because it works on the way back.

    Args:
        policy: a policy or its learn mode.
        run: the folder of the run, or the path of a folder for periodic checkpoints, which is made
            if it is missing.
        settings: the options, each by keyword; see :class:`CkptSaverSettings`.

    Reads:
        ctx.train_iter, ctx.env_step: updates and env steps so far.
        ctx.eval_value: on the way back, if there was an evaluation. An evaluator needs to write
            nothing else; the policy is then saved as it is at the end of the step.
        ctx.eval_output, ctx.last_eval_iter: if the evaluator writes them too: the parameters that
            were evaluated (``ctx.eval_output["policy_state"]``), and after how many updates.

    Raises:
        ConfigError: if ``policy`` or ``run`` has the wrong type, an option is not valid, or ``run``
            is a path and there is no interval.
        CheckpointWriteError: if a file cannot be written; the checkpoint before it is intact.
        RunFolderError: if another task trains in the folder, or the folder was deleted.
    """

    roles = (Role.LEARNER,)
    lead_only = True
    reads = ("train_iter",)
    last_step = True

    settings: CkptSaverSettings

    @takes_options(CkptSaverSettings)
    def __init__(
        self, policy: HasModes | LearnMode, run: RunFolder | str | Path, settings: CkptSaverSettings
    ) -> None:
        self._mode = as_learn_mode(policy, user="CkptSaver")
        self.settings = settings
        self._run: RunFolder | None = None
        if isinstance(run, str | Path):
            if settings.every_env_step is None and settings.every_train_iter is None:
                raise ConfigError(
                    f"CkptSaver saves only periodic checkpoints to a path, and got {str(run)!r} "
                    "without an interval; add every_env_step=..., or pass a RunFolder"
                )
            self._folder = Path(run).absolute()
        else:
            self._run = check_run_folder(run, user="CkptSaver")
            self._folder = run.ckpt_dir_of(settings.name)
        self.owns = (self._folder,)
        self._kept: deque[Path] = deque()
        self._interval = Interval(settings)
        self._begin_iter = 0
        self._best = -math.inf
        self._last_eval_iter = -1
        self._disk_failed = False
        self._tidying = BestEffort(f"remove old checkpoints in {self._folder}")
        self._lock: RunLock = NoLock()
        self._task: Task[Any] | None = None

    @property
    def best_value(self) -> float:
        """The value of the best evaluation; ``-inf`` before the first."""
        return self._best

    def preflight(self, chain: ChainView) -> Iterable[str]:
        """Refuse an interval in a counter that the chain does not have."""
        yield from self._interval.preflight(chain)

    def setup(self, task: Task[Any]) -> None:
        """Remember the task, for its last context, and the folder's best evaluation.

        Raises:
            CheckpointDamaged: if the folder has a best policy whose file is damaged.
            RunFolderError: if the folder is in use by another task, or cannot be written to.
        """
        run = self._run
        self._lock = FolderLock(self._folder, task) if run is None else run.lock(task)
        check_writable(self._folder)
        self._task = task
        self._begin_iter = task.ctx.train_iter
        self._interval.start(task.ctx)
        self._last_eval_iter = task.ctx.last_eval_iter
        if run is not None and self._path("best").exists():
            best = load_checkpoint(self._path("best")).get("last_eval_value", -math.inf)
            self._remember(float(best))

    def __call__(self, ctx: RLContext) -> Iterator[None]:
        """Save on the way back, after the best evaluation so far or at the interval."""
        yield
        is_evaluated = self._run is not None and ctx.eval_value is not None
        if is_evaluated and self._is_best(to_float(ctx.eval_value)):
            self._write_best(ctx)
        self._last_eval_iter = ctx.last_eval_iter
        if self._interval.is_due(ctx):
            self._write_periodic(ctx)

    def close(self) -> None:
        """Save the final state, also after an error."""
        if self._task is None:
            return
        task, self._task = self._task, None
        if self._run is None:
            return
        # A failure that has already ended the run need not be raised twice.
        failed_before = self._disk_failed
        try:
            has_learned = task.ctx.train_iter != self._begin_iter
            if has_learned or not self._path("final").exists():
                self._write("final", task.ctx, self._mode.state_dict())
        except CheckpointWriteError as error:
            if not failed_before:
                raise
            _log.error("cannot save the final checkpoint either: %s", error)
        except RunFolderError as error:
            if task.stopped_ok:
                raise
            _log.error("cannot save the final checkpoint: %s", error)

    def state_dict(self) -> dict[str, Any]:
        """Return the value of the best evaluation, and which periodic checkpoints there are."""
        return {
            "best": self._best,
            "interval": self._interval.state_dict(),
            "kept": [path.name for path in self._kept],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state, unless the folder has a policy with a better evaluation."""
        self._remember(float(state["best"]))
        self._interval.load_state_dict(state["interval"])
        self._kept = deque(self._folder / name for name in state["kept"])

    def _is_best(self, value: float) -> bool:
        # No later evaluation could be better than an infinite one.
        return math.isfinite(value) and value > self._best

    def _remember(self, best: float) -> None:
        if self._is_best(best):
            self._best = best

    def _write_best(self, ctx: RLContext) -> None:
        """Save the policy as it was evaluated, even if it has learned since."""
        output = ctx.eval_output if isinstance(ctx.eval_output, Mapping) else {}
        evaluated, is_remote = output.get("policy_state"), "node_id" in output
        # An evaluator need not write this field, which then has the value of an earlier step.
        is_known = is_remote or ctx.last_eval_iter != self._last_eval_iter
        is_present = ctx.last_eval_iter == ctx.train_iter or (not is_known and evaluated is None)
        # After a restart, two processes can have different weights for one number of updates.
        state = self._mode.state_dict() if is_present and not is_remote else evaluated
        if state is None:
            _log.warning(
                "cannot save the policy of the best evaluation so far (%g): it has learned since, "
                "and the evaluation came without its parameters; put the eval mode's state_dict() "
                "into ctx.eval_output['policy_state']",
                to_float(ctx.eval_value),
            )
            return
        best = to_float(ctx.eval_value)
        at = ctx.last_eval_iter if is_known and ctx.last_eval_iter >= 0 else ctx.train_iter
        path = self._write("best", ctx, state, last_iter=at, last_eval_value=best)
        self._best = best
        ctx.task.emit(_BEST, path, best, only_local=True)

    def _write_periodic(self, ctx: RLContext) -> None:
        name = f"iteration_{ctx.train_iter}"
        if self._run is None and isinstance(ctx, OnlineRLContext):
            name = f"step_{ctx.env_step}"
        path = self._write(name, ctx, self._mode.state_dict())
        if path not in self._kept:  # without updates since the last one, it has replaced that
            self._kept.append(path)
        while len(self._kept) > self.settings.keep:
            with self._tidying:
                self._kept.popleft().unlink(missing_ok=True)

    def _write(
        self, name: str, ctx: RLContext, state: Mapping[str, Any], **counters: float
    ) -> Path:
        self._lock.check()
        path = self._path(name)
        env_step = ctx.env_step if isinstance(ctx, OnlineRLContext) else -1
        now = {"last_iter": ctx.train_iter, "last_step": env_step}
        try:
            described = {DESCRIPTION: describe_policy(self._mode.spec)}
            save_checkpoint(path, {**state, **now, **described, **counters})
        except CheckpointWriteError:
            self._disk_failed = True
            raise
        _log.info("saved %s at update %d", path, ctx.train_iter)
        return path

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}.safetensors"
