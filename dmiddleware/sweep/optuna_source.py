"""Settings that Optuna chooses by the scores of the runs before."""

from __future__ import annotations

import contextlib
import math
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from dmiddleware.errors import ConfigError
from dmiddleware.runs.statistics import last_tenth, short
from dmiddleware.sweep.axes import Axis, Choices
from dmiddleware.sweep.metrics_tail import MetricsTail
from dmiddleware.sweep.sweep_plan import Search, SweepPlan, SweptRun, state_of

if TYPE_CHECKING:
    from optuna import Study, Trial

__all__ = ["STUDY_FILE", "OptunaSource", "check_optuna"]

STUDY_FILE: Final = "study.journal"
_NAME: Final = "sweep"
_FULL_RUNS: Final = 5
_FIRST_EVALUATIONS: Final = 3


def check_optuna() -> None:
    """Refuse to search without the library.

    Raises:
        ConfigError: if it is not installed.
    """
    try:
        import optuna  # noqa: F401
    except ModuleNotFoundError:
        raise ConfigError(
            "--sampler optuna needs Optuna; install it with: pip install 'dmiddleware[optuna]'"
        ) from None


class OptunaSource:
    """Chooses runs by an Optuna study, which is kept in the folder of the sweep.

    The sampler is a tree-structured Parzen estimator. The pruner compares a run with the median of
    the others, from the third evaluation on, once five runs have ended.

    Args:
        folder: the folder of the sweep, which no other process uses now.
        plan: its plan, with a search.

    Attributes:
        study: the study.
    """

    def __init__(self, folder: Path, plan: SweepPlan) -> None:
        import optuna
        from optuna.storages import JournalStorage
        from optuna.storages.journal import JournalFileBackend

        assert plan.search is not None
        self._folder, self._plan, self._search = folder, plan, plan.search
        _repair(folder / STUDY_FILE)
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        storage = JournalStorage(JournalFileBackend(str(folder / STUDY_FILE)))
        self.study: Study = optuna.create_study(
            storage=storage,
            study_name=_NAME,
            load_if_exists=True,
            direction=self._search.direction,
            pruner=_pruner(self._search),
        )
        n_before = len(self.study.get_trials(deepcopy=False))
        # With one seed for all, a sweep that resumes would draw what it has drawn at first.
        self.study.sampler = optuna.samplers.TPESampler(seed=n_before, constant_liar=True)
        self._trials: dict[str, Trial] = {}
        self._left: deque[SweptRun] = deque()
        self._known: list[SweptRun] = []
        for frozen in self.study.get_trials(deepcopy=False):
            self._take_before(frozen)

    def _take_before(self, frozen: Any) -> None:
        """Take a trial of the sweep before it was interrupted."""
        from optuna.trial import Trial, TrialState

        if set(frozen.params) != {axis.option for axis in self._plan.axes}:
            with contextlib.suppress(ValueError):  # killed while it was asked for: nothing has run
                self.study.tell(frozen.number, state=TrialState.FAIL, skip_if_finished=True)
            return
        run = self._run(frozen.number, frozen.params)
        self._known.append(run)
        if frozen.state.is_finished():
            return
        # Optuna has no public way from a trial of its storage to one that reports values.
        self._trials[run.name] = Trial(self.study, frozen._trial_id)
        if state_of(run) not in ("done", "pruned"):
            self._left.append(run)
        else:
            tail = MetricsTail(run.folder, self._plan.metric)
            tail.update()
            self.progressed(run, tail.values)
            self.ended(run, tail.score)

    def known(self) -> list[SweptRun]:
        """Return the runs that have been chosen before."""
        return list(self._known)

    def next(self) -> SweptRun | None:
        """Return an interrupted run, or one with new settings."""
        if self._left:
            return self._left.popleft()
        if len(self._known) >= self._search.trials:
            return None
        trial = self.study.ask()
        chosen = {axis.option: _suggest(trial, axis) for axis in self._plan.axes}
        run = self._run(trial.number, chosen)
        self._trials[run.name] = trial
        self._known.append(run)
        return run

    def progressed(self, run: SweptRun, values: list[float]) -> bool:
        """Report the score after each evaluation, and return whether the pruner stops the run."""
        trial = self._trials[run.name]
        reported = self.study.get_trials(deepcopy=False)[trial.number].intermediate_values
        for n in range(len(reported) + 1, len(values) + 1):
            trial.report(last_tenth(values[:n]), step=n)
        return bool(values) and trial.should_prune()

    def ended(self, run: SweptRun, score: float | None) -> None:
        """Tell the study how a run has ended; one that was interrupted is still running."""
        from optuna.trial import TrialState

        trial, state = self._trials[run.name], state_of(run)
        if state == "pruned":
            self.study.tell(trial, state=TrialState.PRUNED)
        elif state == "failed" or (state == "done" and (score is None or math.isnan(score))):
            self.study.tell(trial, state=TrialState.FAIL)
        elif state == "done":
            self.study.tell(trial, score)

    def conclusion(self) -> str:
        """Return the run with the best score."""
        from optuna.trial import TrialState

        if not self.study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,)):
            return ""
        best = self.study.best_trial
        return f"best: {self._run(best.number, best.params).name}, score {short(best.values[0])}"

    def _run(self, number: int, params: dict[str, Any]) -> SweptRun:
        return self._plan.swept(
            self._folder, {name: str(value) for name, value in params.items()}, number
        )


def _suggest(trial: Trial, axis: Axis) -> Any:
    values = axis.values
    if not isinstance(values, Choices):
        return trial.suggest_float(axis.option, values.low, values.high, log=values.scale == "log")
    if values.low is None:
        return trial.suggest_categorical(axis.option, values.texts)
    return trial.suggest_int(axis.option, values.low, values.low + len(values.texts) - 1)


def _pruner(search: Search) -> Any:
    from optuna.pruners import MedianPruner, NopPruner

    if not search.prunes:
        return NopPruner()
    return MedianPruner(n_startup_trials=_FULL_RUNS, n_warmup_steps=_FIRST_EVALUATIONS)


def _repair(journal: Path) -> None:
    """Remove what a killed process has left: half a line, and the lock of the file."""
    journal.with_name(f"{journal.name}.lock").unlink(missing_ok=True)
    with contextlib.suppress(FileNotFoundError), journal.open("r+b") as file:
        data = file.read()
        file.truncate(data.rfind(b"\n") + 1)
