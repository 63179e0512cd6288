"""Recording an experiment: everything that a run leaves behind, in one middleware."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch

from dmiddleware.best_effort import BestEffort
from dmiddleware.callable_names import importable_module, script_folder
from dmiddleware.command_line import program_call
from dmiddleware.data import load_checkpoint
from dmiddleware.env import BaseEnvManager, EnvSettings
from dmiddleware.env.env_record import env_record
from dmiddleware.errors import ConfigError, TaskStateError
from dmiddleware.files.atomic_file import write_atomically
from dmiddleware.files.serialization import pack
from dmiddleware.pipeline import (
    ChainView,
    Context,
    CurrentNode,
    Declarations,
    Stateful,
    Task,
    current_node,
    middleware_name,
)
from dmiddleware.pipeline.onion import Chain, CompiledMiddleware
from dmiddleware.policy import POLICY_REGISTRY, Policy
from dmiddleware.process.signals import is_signal_reason
from dmiddleware.process.terminal import drop_unwritten, printable
from dmiddleware.runs.provenance import git_state, versions
from dmiddleware.runs.record import EVALUATION, flat_settings, settings_of
from dmiddleware.runs.resuming import (
    accepts_changes,
    changed_settings,
    has_snapshot,
    resumed_folder,
)
from dmiddleware.runs.statistics import short
from dmiddleware.seeding import seed_libraries
from dmiddleware.settings import Count, Settings, TakesSettings, plain_values, takes_options
from middleware.base import BaseMiddleware
from middleware.context import OnlineRLContext, RLContext
from middleware.evaluate import (
    InteractionEvaluator,
    evaluation_prefixes,
    evaluators_of,
    primary_evaluator,
)
from middleware.record.checkpoint import CkptSaver
from middleware.record.learning_curve import LearningCurve
from middleware.record.log import MetricsLogger
from middleware.record.progress_bar import ProgressBar, RunConsole
from middleware.record.run_folder import RunFolder, check_run_folder
from middleware.record.run_log import RunLog
from middleware.roles import Role
from middleware.support.checks import check_instance
from middleware.support.interval import IntervalSettings
from middleware.support.part_name import PartSettings

__all__ = [
    "Experiment",
    "ExperimentResult",
    "ExperimentSettings",
    "FinalCtxSaver",
]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ExperimentResult:
    """The outcome of a run.

    Attributes:
        path: the run's folder.
        mean_return: the mean return over ``n_episode`` fresh episodes of the policy with the best
            evaluation. It is NaN without an evaluator, in a process that does not learn it, and
            after an error or a signal.
        last_return: the same for the policy at the end of the run.
        n_episode: the number of these episodes.
        env_step: environment steps.
        train_iter: updates.
        train_s: duration of the run in seconds, including its evaluations. If it was resumed, it
            includes the time up to the snapshot.
        evaluations: for each evaluation the env step (offline: the update) and the mean return.
        other_evaluations: the same of the evaluators that are not primary, by their names.
        parts: the outcomes of the named parts of the chain that this process learned, by name.
        part: the name of the part of which it is the outcome; None: the whole chain.
    """

    path: Path
    mean_return: float
    last_return: float
    n_episode: int
    env_step: int
    train_iter: int
    train_s: float
    evaluations: tuple[tuple[int, float], ...]
    other_evaluations: Mapping[str, tuple[tuple[int, float], ...]] = dataclasses.field(
        default_factory=dict, kw_only=True
    )
    parts: Mapping[str, ExperimentResult] = dataclasses.field(default_factory=dict, kw_only=True)
    part: str | None = dataclasses.field(default=None, kw_only=True)

    @property
    def ckpt(self) -> Path:
        """The checkpoint of the best evaluation; without evaluations, the final one."""
        return _best_ckpt(RunFolder(self.path), self.part)

    def load_best(self) -> dict[str, Any]:
        """Return the policy's state in :attr:`ckpt`."""
        state: dict[str, Any] = load_checkpoint(self.ckpt)
        return state

    def save(self) -> None:
        """Write ``result.json`` to the run's folder, with everything but the path.

        A learner of a named part that does not lead the run writes ``result.node-<id>.json``.
        Numbers that are not finite become null.

        Raises:
            OSError: if it cannot be written; an earlier file is intact.
        """
        _write_json(RunFolder(self.path).result_path, self._fields())

    def _fields(self) -> dict[str, Any]:
        left_out = ["path", "part", "parts", *(["train_s"] if self.part is not None else [])]
        names = [field.name for field in dataclasses.fields(self) if field.name not in left_out]
        fields = {name: getattr(self, name) for name in names}
        parts = {name: result._fields() for name, result in self.parts.items()}
        return fields | ({"parts": parts} if parts else {})

    def __str__(self) -> str:
        parts = "".join(f"{name}: {result._summary()}; " for name, result in self.parts.items())
        together = "together " if parts else ""
        duration = f"in {self.train_s:.1f} s; files in {printable(self.path)}/"
        return f"{parts}{together}{self._summary()} {duration}"

    def _summary(self) -> str:
        returns = (
            ""
            if math.isnan(self.mean_return)
            else f"mean return {self.mean_return:.1f} over {self.n_episode} fresh episodes of the "
            "best policy, "
        )
        return f"{returns}after {self.env_step:,} env steps and {self.train_iter:,} updates"


@runtime_checkable
class _HasSettings(Protocol):
    @property
    def settings(self) -> Settings | Mapping[str, Any]: ...


class ExperimentSettings(IntervalSettings):
    """The options of :class:`Experiment`."""

    every_train_iter: Count | None = None
    """Updates from one line of metrics to the next; offline, without an interval: 100."""
    every_env_step: Count | None = None
    """Env steps from one line of metrics to the next; without an interval: 1000."""

    root: Path | str = "runs"
    """The folder of all runs."""
    n_fresh_episode: Count = 100
    """Episodes of the final evaluation."""


class Experiment(BaseMiddleware[RLContext], TakesSettings[ExperimentSettings]):
    """Record a run: checkpoints, metrics, a progress bar, the learning curve and a final summary.

    It makes a new folder for the run and combines :class:`~middleware.CkptSaver`,
    :class:`~middleware.MetricsLogger`, :class:`~middleware.ProgressBar`,
    :class:`~middleware.LearningCurve` and :class:`~middleware.FinalCtxSaver`. It also writes the
    text log ``log.txt`` and ``config.yaml``, with the settings that the run used: those of the
    policy, from which :func:`~dmiddleware.policy.create_policy` builds it again, those of each
    middleware of the chain, from its ``settings`` (a mapping, or a subclass of
    :class:`~dmiddleware.settings.Settings`) if it has one, those of the envs, the versions of what
    computes, the git commit, and what the program was called with, see
    :func:`~dmiddleware.program.run_program`. The settings go to TensorBoard's HParams too. When the
    run ends, it evaluates the best and the last
    policy in episodes with new seeds, in the envs of the chain's primary
    :class:`~middleware.InteractionEvaluator`, prints the result and writes it to ``result.json``.
    Before that evaluation, and after an error or a signal, the file has the counters and no
    returns.

    While the task runs, the random generators of Python, numpy and torch are seeded from the task's
    seed.

    The position in the chain does not matter, because it works on the way back. In a run of several
    processes all of them share the folder, and the learner prints the result. If several ranks
    learn, rank 0 does all this, and the others write only their text logs. A process that learns a
    named part alone evaluates its policy at the end and prints its result, too. Its files have the
    number of its node in their names: ``result.node-1.json``.

    A file that only informs and cannot be written, because the disk is full for example, is a
    warning. A policy that cannot be saved is an error.

    Args:
        name: the name of a new folder, or a path below ``root`` (see :meth:`RunFolder.create`); to
            resume a run, its folder: ``RunFolder.create("cartpole", resume=True)``.
        policy: the policy; in a chain whose parts have names, the policy of each part that learns
            one, as in ``{"red": attacker, "blue": defender}``.
        settings: the options, each by keyword; see :class:`ExperimentSettings`.

    Reads:
        ctx.train_iter, ctx.env_step, ctx.last_eval_value: counters.
        ctx.logged, ctx.train_output, ctx.eval_value, ctx.eval_output, ctx.other_evaluations: on the
            way back, if they are set.

    Raises:
        ConfigError: if ``policy`` is not a policy, or an option is not valid.
        ValueError: if ``name`` does not name a folder below ``root``.
    """

    reads = ("train_iter",)
    last_step = True

    settings: ExperimentSettings

    @takes_options(ExperimentSettings)
    def __init__(
        self,
        name: str | RunFolder,
        policy: Policy | Mapping[str, Policy],
        settings: ExperimentSettings,
    ) -> None:
        hint = "build one first, for example with DQNPolicy.for_env(env)"
        self._policies: dict[str | None, Policy] = {
            part: check_instance(learned, Policy, user="Experiment", hint=hint)
            for part, learned in (
                policy.items() if isinstance(policy, Mapping) else [(None, policy)]
            )
        }
        self.settings = settings
        self.run = (
            name if isinstance(name, RunFolder) else RunFolder.create(name, root=settings.root)
        )
        self._logger = MetricsLogger(
            self.run,
            every_train_iter=settings.every_train_iter,
            every_env_step=settings.every_env_step,
        )
        self.owns = (self.run.ckpt_dir, self.run.curve_path, *self._logger.owns)
        self._result: ExperimentResult | None = None
        self._has_run = False
        self._saving = BestEffort(f"write {self.run.result_path}")
        self._earlier_s = 0.0
        self._bar = ProgressBar()
        self._curve = LearningCurve(self.run)
        self._parts: dict[str, BaseMiddleware[RLContext]] = {}
        self._recorders = Chain(())
        self._config: dict[str, Any] = {}
        self._chain: list[dict[str, Any]] = []
        self._envs: dict[str, Any] = {}
        self._evaluators: dict[str | None, InteractionEvaluator | None] = {}
        self._metric = EVALUATION
        self._task: Task[Any] | None = None
        self._cleanup = ExitStack()

    @property
    def result(self) -> ExperimentResult:
        """The outcome of the run, after the task was closed.

        Raises:
            TaskStateError: before that.
        """
        if self._result is None:
            raise TaskStateError(
                "the experiment has no result yet; read it after the `with Task(...)` block"
            )
        return self._result

    def bind(self, chain: ChainView) -> None:
        """Find the evaluator, the limits and the settings of the chain."""
        self._evaluators = {part: primary_evaluator(chain.of(part)) for part in self._policies}
        first = next(iter(self._policies))
        prefix = evaluation_prefixes(chain.of(first))[0]
        self._metric = f"{prefix if first is None else f'{first}/{prefix}'}/return_mean"
        configs = {
            part: {**_named(type(policy)), **plain_values(policy.cfg)}
            for part, policy in self._policies.items()
        }
        self._config = configs[None] if None in configs else {str(p): configs[p] for p in configs}
        self._chain = [{middleware_name(link): _written(link)} for link in chain.whole.middleware]
        envs = {part: _envs_of(chain.of(part), self._evaluators[part]) for part in self._policies}
        self._envs = envs[first] if first is None else {**envs[first], "envs": envs}
        for part in (self._logger, self._curve, self._bar):
            part.bind(chain)

    def preflight(self, chain: ChainView) -> Iterable[str]:
        """Refuse an interval in a counter that the chain lacks, and policies of other parts."""
        yield from self._logger.preflight(chain)
        learning = [p for p in (None, *chain.parts) if chain.of(p).writes("train_output")] or [None]
        missing = [part for part in self._policies if part not in learning]
        further = [part for part in learning if part not in self._policies]
        if missing or (further and None not in self._policies):
            yield (
                f"it records {_named_parts(self._policies)}, but the chain learns "
                f"{_named_parts(learning)}; give it each policy by the name of its part, as in "
                'Experiment("name", {"red": policy, "blue": policy})'
            )

    def setup(self, task: Task[Any]) -> None:
        """Start the log, and set up the parts that are for this process.

        Raises:
            RunFolderError: if the folder is in use by another task, or cannot be written to.
        """
        self.run.lock(task)
        self._task = task
        parts: dict[str, BaseMiddleware[RLContext]] = {
            **{
                "checkpoints" if part is None else f"checkpoints:{part}": CkptSaver(
                    policy, self.run, name=part
                )
                for part, policy in self._policies.items()
            },
            "logger": self._logger,
            "curve": self._curve,
            "final_ctx": FinalCtxSaver(self.run),
            "bar": self._bar,
        }
        self._parts = {
            name: part
            for name, part in parts.items()
            if name == "logger" or _is_for_roles(part, task)
            if task.rank == 0 or not Declarations.of(part).lead_only
        }
        # The first part is the first on the way back.
        self._recorders = Chain(
            CompiledMiddleware(_on_its_context(part), middleware_name(part))
            for part in reversed(self._parts.values())
        )
        seed_libraries(task.seed_for("libraries"))
        self._cleanup.callback(self.run.close)
        self._cleanup.enter_context(RunLog(self.run.log_path))
        self._save_config(task)
        for part in self._parts.values():
            part.setup(_seen_by(part, task))

    def _save_config(self, task: Task[Any]) -> None:
        if not self.run.is_lead:
            return
        call, node = program_call(), current_node()
        config = {
            **({} if call is None else {"program": call.program, "arguments": call.plain()}),
            **_launch_of(node),
            "seed": task.seed,
            "algorithm": ", ".join(type(policy).__name__ for policy in self._policies.values()),
            **self._envs,
            "policy": self._config,
            "chain": self._chain,
            "versions": versions(),
            "git": git_state((call and call.folder) or Path.cwd()),
        }
        self._check_changes(config)
        self.run.save_config(config)
        compared = {"seed": task.seed, "algorithm": config["algorithm"], **self._envs}
        chain = {
            ".".join(filter(None, (name, options.get("name")))): options
            for part in self._chain
            for name, options in part.items()
        }
        flat = flat_settings(plain_values({**compared, "policy": self._config, **chain}))
        self.run.tb_logger.add_settings(dict(flat), (self._metric, "collect/return_mean"))

    def _check_changes(self, config: Mapping[str, Any]) -> None:
        """Show the settings that differ from the settings of the run that is continued.

        Raises:
            ConfigError: if ``ditask resume`` continues the run without ``--accept-changes``.
        """
        before = settings_of(self.run.path)
        changes = changed_settings(before, config) if before else []
        if not changes:
            return
        if resumed_folder() is not None and not accepts_changes():
            raise ConfigError(
                f"the run in {self.run.path} had other settings: {'; '.join(changes)}. Continue "
                "with them by ditask resume --accept-changes, or leave the changes out"
            )
        _log.warning("the run continues with other settings: %s", "; ".join(changes))

    def __call__(self, ctx: RLContext) -> Iterator[None]:
        """Record the step, on its way back."""
        self._has_run = True
        yield from self._recorders.middleware(ctx)

    def close(self) -> None:
        """Write the last files, evaluate the best policy and print the result."""
        if self._task is None:
            return
        task, self._task = self._task, None
        with self._cleanup:
            with ExitStack() as closing:
                for part in reversed(self._parts.values()):
                    closing.callback(part.close)
            train_s = self._train_s
            # This file stays if the final evaluation fails, or the process is killed meanwhile.
            self._save_result(self._make_result(task, train_s, {}), task)
            returns = {part: self._judge(part, task) for part in self._policies}
            self._save_result(self._make_result(task, train_s, returns), task)
            if self._reports(task) and task.stopped_ok:
                self._print(str(self._result))
            if self.run.is_lead and is_signal_reason(task.stop_reason):
                self._print(self._continuation())

    def _continuation(self) -> str:
        """Return how to continue a run that was interrupted; empty: it has no snapshot."""
        path, call = self.run.path, program_call()
        if not has_snapshot(path):
            return ""
        text = f"to continue this run: ditask resume {printable(path)}"
        if call is not None and "resume" in call.plain():
            text += f'; in Python: the same with exp_name="{printable(path.name)}" and resume=True'
        return text

    def _print(self, text: str) -> None:
        with BestEffort("print the result", OSError, ValueError):
            if text:
                RunConsole().print(text, highlight=False, soft_wrap=True, markup=False)
        for stream in (sys.stdout, sys.stderr):
            drop_unwritten(stream)

    def state_dict(self) -> dict[str, Any]:
        """Return the duration of the run, the states of the parts, and what the bar shows."""
        parts = {
            name: part.state_dict()
            for name, part in self._parts.items()
            if isinstance(part, Stateful)
        }
        returns = self._bar.recent_returns()
        return {"train_s": self._train_s, "parts": parts, "returns": returns}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        self._earlier_s = state["train_s"] - self.run.age_s
        for name, part_state in state["parts"].items():
            part = self._parts[name]
            assert isinstance(part, Stateful)
            part.load_state_dict(part_state)
        if "returns" in state:
            self._bar.show_returns(state["returns"])

    @property
    def _train_s(self) -> float:
        return self._earlier_s + self.run.age_s

    def _judge(self, part: str | None, whole_task: Task[Any]) -> tuple[list[float], list[float]]:
        """Return the returns of the best and of the last policy in fresh episodes.

        They are empty without an evaluator, in processes that do not learn it, and after an error
        or a signal.
        """
        task = whole_task if part is None else whole_task.part(part)
        interrupted = (task.stop_reason or "").startswith("received SIG")
        judges = _learns(part, whole_task) and task.stopped_ok and not interrupted
        evaluator = self._evaluators.get(part)
        if evaluator is None or not judges:
            return [], []
        seed = task.seed_for("fresh episodes")
        states = [load_checkpoint(path_in(self.run, part)) for path_in in (_best_ckpt, _final_ckpt)]
        best = last = self._fresh_returns(evaluator, states[0], seed)
        if not _is_same_policy(*states):
            last = self._fresh_returns(evaluator, states[1], seed)
            mean_last, mean_best = _mean(last), _mean(best)
            is_better = mean_last > mean_best and short(mean_last) != short(mean_best)
            if task.ctx.last_eval_iter < task.ctx.train_iter and is_better:
                _log.warning(
                    "the last policy%s has a mean return of %s in fresh episodes, and the best "
                    "one %s: the run ended before the last one was evaluated. The last policy is "
                    "in %s; evaluate more often, so that it can be the best",
                    "" if part is None else f" of {part}",
                    short(mean_last),
                    short(mean_best),
                    _final_ckpt(self.run, part),
                )
        return best, last

    def _make_result(
        self,
        task: Task[Any],
        train_s: float,
        returns: Mapping[str | None, tuple[list[float], list[float]]],
    ) -> ExperimentResult:
        """Return the result.

        Args:
            task: the task.
            train_s: the duration of the run in seconds.
            returns: those of the best and of the last policy, by the part that has learned it.
        """
        curve = self._curve if "curve" in self._parts else None
        best, last = returns.get(None, ([], []))
        parts = {
            part: self._result_of(part, task, train_s, returns.get(part, ([], [])))
            for part in self._policies
            if part is not None and task.part(part).has_role(Role.LEARNER)
        }
        return ExperimentResult(
            parts=parts,
            path=self.run.path,
            mean_return=_mean(best),
            last_return=_mean(last),
            n_episode=len(best),
            env_step=task.ctx.env_step if isinstance(task.ctx, OnlineRLContext) else 0,
            train_iter=task.ctx.train_iter,
            train_s=train_s,
            evaluations=tuple(curve.evaluations) if curve is not None else (),
            other_evaluations={
                name: tuple(evaluations)
                for name, evaluations in (
                    curve.other_evaluations if curve is not None else {}
                ).items()
            },
        )

    def _result_of(
        self, part: str, task: Task[Any], train_s: float, returns: tuple[list[float], list[float]]
    ) -> ExperimentResult:
        """Return the result of a named part."""
        ctx, (best, last) = task.ctx.part(part), returns
        has_curve = "curve" in self._parts
        return ExperimentResult(
            part=part,
            path=self.run.path,
            mean_return=_mean(best),
            last_return=_mean(last),
            n_episode=len(best),
            env_step=ctx.env_step if isinstance(ctx, OnlineRLContext) else 0,
            train_iter=ctx.train_iter,
            train_s=train_s,
            evaluations=tuple(self._curve.evaluations_of(part)) if has_curve else (),
        )

    def _save_result(self, result: ExperimentResult, task: Task[Any]) -> None:
        """Keep the result, also of a run that failed, so that none of an earlier run is left.

        A run that was refused, as one with other settings, has no result.
        """
        self._result = result
        if self._reports(task) and (task.stopped_ok or self._has_run):
            with self._saving:
                result.save()

    def _reports(self, task: Task[Any]) -> bool:
        """Return whether this process has a result: it leads the run, or learns a policy."""
        return self.run.is_lead or any(_learns(part, task) for part in self._policies)

    def _fresh_returns(
        self, evaluator: InteractionEvaluator, state: Mapping[str, Any], seed: int
    ) -> list[float]:
        return evaluator.evaluate_fresh(state, n_episode=self.settings.n_fresh_episode, seed=seed)


class FinalCtxSaver(BaseMiddleware[Context]):
    """Write ``final_ctx.json`` to the run's folder when the task ends, also after an error.

    The file has the kept fields of the context that are numbers, strings, booleans or None
    (numbers that are not finite become null), and ``stop_reason``. If it cannot be written, a
    warning says so. In a run of several processes the learner writes it; one of a named part writes
    its own, ``final_ctx.node-<id>.json``.

    Args:
        run: the folder.

    Raises:
        ConfigError: if ``run`` is not a RunFolder.
    """

    roles = (Role.LEARNER,)
    with_parts = True
    lead_only = True

    @takes_options
    def __init__(self, run: RunFolder) -> None:
        self._run = check_run_folder(run, user="FinalCtxSaver")
        self._path = run.final_ctx_path
        self._best_effort = BestEffort(f"write {self._path}")
        self._task: Task[Any] | None = None

    def setup(self, task: Task[Any]) -> None:
        """Remember the task, for its last context.

        Raises:
            RunFolderError: if the folder is in use by another task, or cannot be written to.
        """
        self._run.lock(task)
        self._task = task
        with self._best_effort:
            self._path.unlink(missing_ok=True)  # a run that continues has no end yet

    def __call__(self, ctx: Context) -> None:
        """Do nothing: the file is written at the end."""

    def close(self) -> None:
        """Write the file."""
        if self._task is None:
            return
        task, self._task = self._task, None
        fields = _plain_fields(task.ctx)
        if task.ctx.parts:
            fields["parts"] = {name: _plain_fields(part) for name, part in task.ctx.parts.items()}
        with self._best_effort:
            _write_json(self._path, {**fields, "stop_reason": task.stop_reason})


def _named_parts(parts: Iterable[str | None]) -> str:
    names = ["a policy without a name" if part is None else f"that of {part!r}" for part in parts]
    return " and ".join(names)


def _plain_fields(ctx: Context) -> dict[str, Any]:
    """Return the kept fields that JSON can represent."""
    values = ctx.state_dict()["values"].items()
    return {n: value for n, value in values if isinstance(value, bool | int | float | str | None)}


def _seen_by(part: BaseMiddleware[Any], task: Task[Any]) -> Task[Any]:
    """Return the task as a middleware of a part of its chain sees it."""
    return task if part.part_name is None else task.part(part.part_name)


def _on_its_context(part: BaseMiddleware[Any]) -> Callable[[Any], object]:
    """Return a middleware that takes the context of the whole chain."""
    name = part.part_name
    return part if name is None else lambda ctx: part(ctx.part(name))


def _learns(part: str | None, task: Task[Any]) -> bool:
    """Return whether this process learns the policy of a part, and of several ranks is rank 0."""
    view = task if part is None else task.part(part)
    return task.rank == 0 and view.has_role(Role.LEARNER)


def _is_for_roles(recorder: BaseMiddleware[Any], task: Task[Any]) -> bool:
    """Return whether a recorder runs in processes with the roles of this one."""
    declares = Declarations.of(recorder)
    parts = task.chain.parts if declares.with_parts else ()
    views = [_seen_by(recorder, task), *map(task.part, parts)]
    return any(view.has_role(role) for view in views for role in declares.roles)


def _envs_of(chain: ChainView, evaluator: InteractionEvaluator | None) -> dict[str, Any]:
    """Return the records of the envs that collect, and of the envs that evaluate if these differ.

    If none collects, the envs of the evaluator that decides take their place. In a part, a
    middleware without a name may collect for several parts.
    """
    evaluators = evaluators_of(chain)
    shared = () if chain.part is None else chain.of(None).middleware
    others = (
        part for part in (*chain.middleware, *shared) if not isinstance(part, InteractionEvaluator)
    )
    records = map(_record_of, (*others, *([] if evaluator is None else [evaluator]), *evaluators))
    record: dict[str, Any] = next(filter(None, records), {})
    envs: dict[str, Any] = {"env": record}
    for part in evaluators:
        evaluated = _record_of(part) or record
        if evaluated != record and part is evaluator:
            envs["eval_env"] = evaluated
        elif evaluated != record:
            envs.setdefault("other_eval_envs", {})[str(part.settings.name)] = evaluated
    return envs


def _record_of(part: object) -> dict[str, Any]:
    """Return the record of the first env manager that a middleware owns; empty: it has none."""
    for owned in getattr(part, "owns", ()):
        if isinstance(owned, BaseEnvManager) and isinstance(owned.settings, EnvSettings):
            return env_record(owned.settings)
    return {}


def _launch_of(node: CurrentNode | None) -> dict[str, Any]:
    """Return the options of ``ditask`` with which a run was started, or starts again."""
    folder = script_folder()
    if node is not None:
        options = dict(node.launch)
    elif folder is None or folder == Path.cwd() or importable_module("__main__") == "__main__":
        options = {}
    else:
        options = {"package": os.path.relpath(folder)}
    return {"launch": options} if options else {}


def _named(cls: type[Policy]) -> dict[str, Any]:
    """Return what a config needs so that ``create_policy`` finds the class, if it can."""
    names = [name for name in POLICY_REGISTRY if POLICY_REGISTRY.get(name) is cls]
    if not names:
        return {}
    is_stock = cls.__module__.startswith("dmiddleware.")
    return {"type": names[0], **({} if is_stock else {"import_names": [cls.__module__]})}


def _written(one: object) -> dict[str, Any]:
    """Return what ``config.yaml`` has of a middleware: its options and those of its components."""
    written: dict[str, Any] = {}
    with contextlib.suppress(Exception):  # a class of the program's own has anything there
        if isinstance(one, BaseMiddleware | _HasSettings):
            settings = plain_values(one.settings)
            written |= settings if isinstance(settings, dict) else {"settings": settings}
            if isinstance(one.settings, PartSettings) and one.settings.name is None:
                written.pop("name", None)
        if isinstance(one, BaseMiddleware):
            for name, part in one.components.items():
                written[name] = _written_part(part)
    return written


def _written_part(part: object) -> Any:
    if isinstance(part, _HasSettings):
        return {"type": type(part).__name__, **plain_values(part.settings)}
    return plain_values(part)


def _is_same_policy(first: Mapping[str, Any], second: Mapping[str, Any]) -> bool:
    """Return whether two checkpoints differ at most in the evaluation that they remember."""
    (rest, tensors), (other_rest, others) = (
        pack({**state, "last_eval_value": None}) for state in (first, second)
    )
    return (
        rest == other_rest
        and tensors.keys() == others.keys()
        and all(torch.equal(tensor, others[name]) for name, tensor in tensors.items())
    )


def _mean(returns: list[float]) -> float:
    return sum(returns) / len(returns) if returns else math.nan


def _best_ckpt(run: RunFolder, part: str | None) -> Path:
    path = run.ckpt_dir_of(part) / "best.safetensors"
    return path if path.exists() else _final_ckpt(run, part)


def _final_ckpt(run: RunFolder, part: str | None) -> Path:
    return run.ckpt_dir_of(part) / "final.safetensors"


def _write_json(path: Path, fields: Mapping[str, Any]) -> None:
    """Write a file that never exists in part."""
    text = json.dumps(_finite(fields), indent=2, allow_nan=False) + "\n"
    write_atomically(path, lambda file: file.writelines([text.encode()]), durable=False)


def _finite(value: Any) -> Any:
    """Return a value as JSON can hold it, with null for numbers that are not finite."""
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if hasattr(value, "item"):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value
