"""Checkpoints: the policy on disk, while it learns and when it is done."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from dmiddleware.data import load_checkpoint, save_checkpoint
from dmiddleware.errors import CheckpointWriteError
from dmiddleware.pipeline import Role, Task
from dmiddleware.policy import LearnMode
from middleware.run_folder import RunFolder
from middleware.support.checks import check_positive

__all__ = ["CkptSaver"]

_log = logging.getLogger(__name__)


class CkptSaver:
    """Save the policy: whenever an evaluation is the best so far, now and then, and at the end.

    In the run's folder ``ckpt`` there will be

    - ``best.safetensors``: the policy of the best evaluation. If it learned on before it could be
      saved, or was evaluated in another process, these are its parameters as they were evaluated;
      else its whole state, with optimiser and counters.
    - ``iteration_<n>.safetensors``: its whole state after ``n`` updates, the newest few.
    - ``final.safetensors``: its whole state at the end of the run, also when an error ends it (a
      loss that is NaN, Ctrl-C), so that nothing learned is lost. The one of an earlier run in the
      same folder stays if this one ends before it has learned anything.

    Each file is written whole or not at all, and has, beside the policy's state, ``last_iter`` and
    ``last_step``, as those of a learner's ``SaveCkptHook`` do; the best one has its
    ``last_eval_value`` too, so that a learner that is started again in the same folder replaces it
    by a better one only.

    Its place in the chain does not matter, as it works on the way back.

    Args:
        learn_mode: the policy's learn mode.
        run: whose folder is used.
        every_train_iter: updates from one periodic checkpoint to the next; None: none of these.
        keep: how many periodic checkpoints to keep.

    Reads:
        ctx.train_iter: updates so far.
        ctx.eval_value, ctx.eval_output: on the way back, if there was an evaluation.

    Raises:
        ValueError: if ``every_train_iter`` or ``keep`` is not positive.
        CheckpointWriteError: if a file cannot be written; the one before it is intact.
    """

    roles = (Role.LEARNER,)
    reads = ("train_iter",)
    last_step = True

    def __init__(
        self,
        learn_mode: LearnMode,
        run: RunFolder,
        *,
        every_train_iter: int | None = None,
        keep: int = 3,
    ) -> None:
        check_positive(every_train_iter=every_train_iter, keep=keep)
        self._mode = learn_mode
        self._run = run
        self._every = every_train_iter
        self._keep = keep
        self._kept: deque[Path] = deque()
        self._saved_iter = self._begin_iter = 0
        self._best = -math.inf
        self._disk_failed = False
        self._task: Task[Any] | None = None

    @property
    def best_value(self) -> float:
        """The mean return of the best evaluation; ``-inf`` before the first."""
        return self._best

    def setup(self, task: Task[Any]) -> None:
        """Remember the task, whose last context is saved at the end, and the folder's best policy.

        Raises:
            CheckpointDamaged: if there is a best policy, and its file is damaged.
        """
        self._task = task
        self._saved_iter = self._begin_iter = task.ctx.train_iter
        if self._run.best_ckpt.exists():
            best = load_checkpoint(self._run.best_ckpt).get("last_eval_value", -math.inf)
            self._best = max(self._best, best)

    def __call__(self, ctx: Any) -> Iterator[None]:
        """Save on the way back, if there is a new best or it is time."""
        yield
        # NaN is never the best: every comparison with it is false.
        if ctx.eval_value is not None and ctx.eval_value > self._best:
            self._write_best(ctx)
        if self._every is not None and ctx.train_iter - self._saved_iter >= self._every:
            self._saved_iter = ctx.train_iter
            self._write_periodic(ctx)

    def close(self) -> None:
        """Save what there is at the end of the run, also after an error."""
        if self._task is None:
            return
        task, self._task = self._task, None
        if task.ctx.train_iter == self._begin_iter and self._path("final").exists():
            return
        failed_before = self._disk_failed
        try:
            self._write("final", task.ctx, self._mode.state_dict())
        except CheckpointWriteError as error:
            if not failed_before:
                raise
            # The same failure has ended the run already; one error tells enough.
            _log.error("the final checkpoint could not be saved either: %s", error)

    def state_dict(self) -> dict[str, Any]:
        """Return the best value and which periodic checkpoints are kept."""
        return {
            "best": self._best,
            "saved_iter": self._saved_iter,
            "kept": [path.name for path in self._kept],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned; a better policy in the folder stays best."""
        self._best = max(self._best, float(state["best"]))
        self._saved_iter = int(state["saved_iter"])
        self._kept = deque(self._run.ckpt_dir / name for name in state["kept"])

    def _write_best(self, ctx: Any) -> None:
        """Save the policy that was evaluated, though it may have learned since."""
        output = ctx.eval_output if isinstance(ctx.eval_output, Mapping) else {}
        # Two processes may mean different weights by one number of updates, after a restart say.
        is_own = "node_id" not in output and ctx.last_eval_iter == ctx.train_iter
        state = self._mode.state_dict() if is_own else output.get("policy_state")
        if state is None:
            _log.warning(
                "the best evaluation so far (%g) came without the parameters that it judged, and "
                "the policy has learned on since: it is not saved; put the eval mode's state_dict "
                "into ctx.eval_output['policy_state']",
                ctx.eval_value,
            )
            return
        self._write("best", ctx, state)
        self._best = ctx.eval_value

    def _write_periodic(self, ctx: Any) -> None:
        self._kept.append(self._write(f"iteration_{ctx.train_iter}", ctx, self._mode.state_dict()))
        while len(self._kept) > self._keep:
            self._kept.popleft().unlink(missing_ok=True)

    def _write(self, name: str, ctx: Any, policy_state: Mapping[str, Any]) -> Path:
        path = self._path(name)
        counters: dict[str, float] = {
            "last_iter": ctx.train_iter,
            "last_step": getattr(ctx, "env_step", -1),
        }
        if name == "best":
            counters["last_iter"] = ctx.last_eval_iter
            counters["last_eval_value"] = ctx.eval_value
        try:
            save_checkpoint(path, {**policy_state, **counters})
        except CheckpointWriteError:
            self._disk_failed = True
            raise
        _log.info("saved %s at update %d", path, ctx.train_iter)
        return path

    def _path(self, name: str) -> Path:
        return self._run.ckpt_dir / f"{name}.safetensors"
