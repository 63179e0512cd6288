"""The learner: trains a policy and calls hooks."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, ClassVar, Self, cast

import numpy as np
import torch
from easydict import EasyDict

from dmiddleware.classic import LearnMode, as_learn_mode
from dmiddleware.classic.config import (
    Configurable,
    Option,
    count,
    one_of,
    optional,
    positive,
    switch,
    text,
    whole,
)
from dmiddleware.classic.keywords import also_named
from dmiddleware.classic.logs import LOG_TO_FILE, LazyWriter, TextLog, log_folder
from dmiddleware.classic.modes import spec_attribute
from dmiddleware.data import load_checkpoint
from dmiddleware.errors import CheckpointDamaged, ConfigError
from dmiddleware.policy import HasModes, is_update, priorities_of_rows, update_outputs
from dmiddleware.process.closing import Closing
from dmiddleware.process.signals import HeldSignals
from dmiddleware.process.torch_threads import limited_threads
from dmiddleware.registry import Registry
from dmiddleware.schedule import Counters
from dmiddleware.tree import lead_shape
from dmiddleware.worker.learner.hooks import (
    POSITIONS,
    Hooks,
    LearnerHook,
    LoadCkptHook,
    SaveCkptHook,
    add_learner_hook,
    build_learner_hook_by_cfg,
    checkpoints_in,
    merge_hooks,
)
from dmiddleware.worker.learner.prefetch import LoaderClosed, PrefetchLoader
from dmiddleware.worker.learner.statistics import CountVar, MovingAverages
from dmiddleware.worker.ranks import rank_and_world_size
from dmiddleware.worker.serial_worker import get_worker_cls

__all__ = ["LEARNER_REGISTRY", "BaseLearner", "create_learner"]

_WINDOW = 100
_BUFFER_KEYS = ("replay_buffer_idx", "replay_unique_id", "index")
_TIMES = ("train_time", "data_time")


class BaseLearner(Closing, Configurable):
    """Trains a policy: ``before_run → (before_iter → forward → after_iter)* → after_run``.

    Either call :meth:`train` with each batch, or let :meth:`start` run the loop over a data loader.

    Args:
        cfg: what differs from ``default_config()``.
        policy: a policy, or its learn mode; may be set later.
        tb_logger: a tensorboardX ``SummaryWriter``; None creates one in ``<exp_name>/log`` on first
            use.
        dist_info: ``(rank, world_size)``; None takes those of ``torch.distributed``.
        exp_name: folder for the learner's output.
        instance_name: distinguishes learners in logs and folders.

    Raises:
        ConfigError: for an unusable config, or an argument of the wrong type.
    """

    config: ClassVar[dict[str, Any]] = {
        "train_iterations": Option(int(1e9), whole, "updates made by start()"),
        "dataloader": {
            "num_workers": Option(0, whole, "workers that load samples"),
            "worker": Option("thread", one_of("thread", "process"), "kind of worker"),
            "prefetch": Option(2, count, "batches to load ahead"),
            "chunk_size": Option(
                None,
                optional(count),
                "samples that a worker loads at a time, a divisor of the batch size; None: 1",
            ),
            "timeout_s": Option(600.0, positive, "seconds to wait for a batch"),
        },
        "log_policy": Option(True, switch, "whether to log the policy's model at the start"),
        "log_to_file": LOG_TO_FILE,
        "only_monitor_rank0": Option(True, switch, "whether to keep statistics on rank 0 only"),
        "is_multitask_pipeline": Option(
            False, switch, "whether every rank has a task and TensorBoard folder of its own"
        ),
        "hook": {
            "load_ckpt_before_run": Option("", text, "checkpoint to load first; empty loads none"),
            "log_show_after_iter": Option(100, optional(count), "iterations between logs"),
            "save_ckpt_after_iter": Option(
                10000, optional(count), "iterations between checkpoints"
            ),
            "save_ckpt_after_run": Option(True, switch, "whether to save a checkpoint at the end"),
        },
    }
    config_open: ClassVar[tuple[str, ...]] = ("hook",)

    def __init__(
        self,
        cfg: Mapping[str, Any] | None = None,
        policy: HasModes | LearnMode | None = None,
        tb_logger: Any = None,
        dist_info: tuple[int, int] | None = None,
        exp_name: str = "default_experiment",
        instance_name: str = "learner",
    ) -> None:
        self._cfg: EasyDict = self.merged_config(cfg)
        self._exp_name = exp_name
        self._instance_name = instance_name
        self._rank, self._world_size = _checked_ranks(dist_info or rank_and_world_size())
        self._logger = TextLog.of_worker(
            __name__,
            exp_name,
            instance_name,
            to_file=self._cfg.log_to_file and self._rank == 0,
        )
        own = f"_rank{self._rank}" if self._cfg.is_multitask_pipeline else ""
        self._writer = LazyWriter(tb_logger, log_folder(exp_name, f"{instance_name}{own}"))
        self._last_iter = CountVar()
        self._collector_envstep = -1
        self._done = False
        self._closing = threading.Event()
        self._threads = ExitStack()
        self._running: threading.Thread | None = None
        self._ckpt_name: str | None = None
        self._policy_id = ""
        self._n_to_run = int(self._cfg.train_iterations)
        self._priority_info: dict[str, Any] = {}
        self._log_buffer: dict[str, dict[str, Any]] = {
            "scalar": {}, "scalars": {}, "histogram": {},
        }  # fmt: skip
        self._monitor = MovingAverages(_TIMES, window=_WINDOW)
        self._loader: PrefetchLoader | None = None
        self._get_data: Callable[[int], list[Callable[[], Any]]] | None = None
        self._policy: LearnMode | None = None
        if policy is not None:
            self._set_policy(policy)
        self._timed_forward = self._time_wrapper(self._call_policy, "scalar", "train_time")
        self._timed_load = self._time_wrapper(self._load, "scalar", "data_time")
        self._hooks: Hooks = {position: [] for position in POSITIONS}
        if self._world_size > 1 and "log_reduce_after_iter" not in self._cfg.hook:
            self._cfg.hook["log_reduce_after_iter"] = True
        self._setup_hook()
        self._setup_wrapper()

    def __enter__(self) -> Self:
        """Let torch use one thread, or those that were asked for, until the learner is closed."""
        self._threads.enter_context(limited_threads(says=self._rank == 0))
        return self

    def _setup_hook(self) -> None:
        """Build the hooks; called once by the constructor."""
        self._hooks = merge_hooks(self._hooks, build_learner_hook_by_cfg(self._cfg.hook))

    def _setup_wrapper(self) -> None:
        """Install further timers, of a subclass; called once by the constructor."""

    def _time_wrapper(
        self, function: Callable[..., Any], var_type: str, var_name: str
    ) -> Callable[..., Any]:
        """Return a function that also writes its duration into the log buffer, in seconds."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            answer = function(*args, **kwargs)
            self._log_buffer[var_type][var_name] = time.perf_counter() - began
            return answer

        return timed

    def _call_policy(self, data: Any, **kwargs: Any) -> Any:
        return self.policy.forward(data, **kwargs)

    def _load(self) -> list[Any]:
        assert self._loader is not None
        return next(self._loader)

    def train(
        self, data: Any, envstep: int = -1, policy_kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call the policy's forward, with the hooks before and after it.

        Args:
            data: a batch, in the form that the policy's forward takes.
            envstep: env steps collected so far; negative keeps the last value.
            policy_kwargs: passed to the policy's forward.

        Returns:
            What the forward returned: a dictionary, or a list of them. Each counts as one
            iteration, except those with ``kl_stop``: no update was made there.

        Raises:
            ConfigError: if no policy was set.
            PolicyOutputError: if the forward returns anything else.
            NonFiniteLoss: if the loss is NaN or infinite; the ``after_iter`` hooks do not run.
        """
        if envstep >= 0:
            self._collector_envstep = envstep
        if self._policy is None:
            raise _no_policy()
        if data is None:
            raise ConfigError(f"{self} got None instead of a batch; pass train(batch)")
        if self._follows_env_step and self._collector_envstep >= 0:
            self._policy.spec.set_counters(Counters(env_step=self._collector_envstep))
        self.call_hook("before_iter")
        answer: Any = self._timed_forward(data, **(policy_kwargs or {}))
        outputs = update_outputs(answer)
        self._priority_info = _priority_info(outputs, data) or self._priority_info
        for output in outputs:
            self._log_output(output)
            if is_update(output):
                self.call_hook("after_iter")
                self._last_iter.add(1)
        return answer

    def _log_output(self, output: Mapping[str, Any]) -> None:
        scalar = self._log_buffer["scalar"]
        for key, value in output.items():
            if isinstance(value, float | int):
                scalar[key] = value
            elif key.startswith("[scalars]"):
                self._log_buffer["scalars"][key.removeprefix("[scalars]")] = value
            elif key.startswith("[histogram]"):
                self._log_buffer["histogram"][key.removeprefix("[histogram]")] = value
            elif (
                isinstance(value, torch.Tensor | np.generic | np.ndarray)
                and math.prod(value.shape) == 1
                and not isinstance(value.item(), str)
            ):
                scalar[key] = value.item()

    def start(self) -> None:
        """Run the whole training: ``train_iterations`` batches from the data loader.

        :meth:`close`, called by another thread, ends the training after the current update.

        If an exception, Ctrl-C or SIGTERM ends the training, a checkpoint is saved first; a signal
        waits for the current iteration. Then the exception is raised again, or the signal has its
        effect, as :class:`~dmiddleware.process.signals.HeldSignals` describes. An exception of a
        ``before_run`` hook saves nothing: no training happened, and the checkpoint could overwrite
        an earlier one.

        Raises:
            ConfigError: if the policy or the data loader is missing.
            KeyboardInterrupt: after a SIGINT.
            SystemExit: after a SIGTERM, with exit code 143.
        """
        if self._loader is None or self._closing.is_set():
            raise ConfigError(
                "the learner has no data; set `learner.get_data` and call setup_dataloader() "
                "before start(), or call train(batch) in your own loop"
            )
        self._running = threading.current_thread()
        try:
            self._run()
        finally:
            self._running = None
            if self._closing.is_set():
                self._writer.close()

    def _run(self) -> None:
        with HeldSignals() as signals:
            self.call_hook("before_run")
            try:
                for _ in range(self._n_to_run):
                    if self._closing.is_set():
                        break
                    self._one_iteration(signals)
                with signals.interruptible():
                    pass
                self.call_hook("after_run")
                self._done = True
            except BaseException as error:
                self._save_after(error, signals.reason or type(error).__name__)
                raise

    def _one_iteration(self, signals: HeldSignals) -> None:
        with signals.interruptible():
            try:
                data = self._timed_load()
            except LoaderClosed:
                if not self._closing.is_set():
                    raise
                return
        self.train(data)

    def _save_after(self, error: BaseException, reason: str) -> None:
        self._logger.error(
            "%s stops at iteration %d: %s; saving a checkpoint",
            self._instance_name, self.train_iter, reason,
        )  # fmt: skip
        try:
            self.save_checkpoint()
        except Exception as another:
            # Not raised: it would hide the first error.
            self._logger.exception("saving the checkpoint failed too")
            error.add_note(f"the learner's checkpoint could not be saved: {another}")

    def setup_dataloader(self) -> None:
        """Start to prefetch batches from ``get_data``.

        Raises:
            ConfigError: if ``get_data`` or the policy was not set.
        """
        if self.get_data is None:
            raise ConfigError(
                "set `learner.get_data` first: a function of the batch size that returns that many "
                "callables, each of which loads one sample"
            )
        self._close_loader()
        self._closing.clear()
        self._loader = PrefetchLoader(
            self.get_data,
            cast(Any, spec_attribute(self.policy.spec, "batch_size")),
            **self._cfg.dataloader,
        )

    @property
    def get_data(self) -> Callable[[int], list[Callable[[], Any]]] | None:
        """A function of the batch size that returns that many callables; each loads one sample.

        A subclass may define it as a method, ``get_data(self, batch_size)``.
        """
        return self._get_data

    @get_data.setter
    def get_data(self, function: Callable[[int], list[Callable[[], Any]]]) -> None:
        if not callable(function):
            raise ConfigError(f"get_data must be a function of the batch size, got {function!r}")
        self._get_data = function

    @also_named(name="position")
    def call_hook(self, position: str) -> None:
        """Call the hooks of one position, in order of priority.

        Args:
            position: ``before_run``, ``before_iter``, …; as a keyword also ``name``.

        Raises:
            ConfigError: for an unknown position.
        """
        if position not in self._hooks:
            raise ConfigError(
                f"the position must be one of {', '.join(self._hooks)}, got {position!r}"
            )
        for hook in self._hooks[position]:
            hook(self)

    def register_hook(self, hook: LearnerHook) -> None:
        """Add a hook, ordered by priority."""
        add_learner_hook(self._hooks, hook)

    @property
    def hooks(self) -> Hooks:
        """The hooks by position, in the order in which they run."""
        return {position: list(hooks) for position, hooks in self._hooks.items()}

    def save_checkpoint(self, ckpt_name: str | None = None) -> None:
        """Save a checkpoint now, with the hook ``save_ckpt_after_run``.

        Args:
            ckpt_name: file name; None takes :attr:`ckpt_name`, or a name with the iteration.

        Raises:
            CheckpointWriteError: if the file cannot be written; an earlier file stays intact.
        """
        before = self._ckpt_name
        if ckpt_name is not None:
            self._ckpt_name = ckpt_name
        try:
            self._save_hook()(self)
        finally:
            self._ckpt_name = before

    def _save_hook(self) -> LearnerHook:
        for hook in self._hooks["after_run"]:
            if hook.name == "save_ckpt_after_run":
                return hook
        # The config omits the hook, but a checkpoint is requested now.
        return SaveCkptHook("save_ckpt_after_run", 20, position="after_run")

    def state_dict(self) -> dict[str, Any]:
        """Return the policy's complete state, with ``last_iter`` and ``last_step``.

        With a :attr:`policy_id`, the state has that too.
        """
        state = {
            **self.policy.state_dict(),
            "last_iter": self.train_iter,
            "last_step": self._collector_envstep,
        }
        return {**state, "policy_id": self._policy_id} if self._policy_id else state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state; without counters, as in a policy's own state, count from 0.

        Raises:
            CheckpointMismatch: if the state belongs to another model.
        """
        own = dict(state)
        last_iter, last_step = own.pop("last_iter", 0), own.pop("last_step", -1)
        own.pop("policy_id", None)
        self.policy.load_state_dict(own)
        self._last_iter.update(last_iter)
        self._collector_envstep = last_step

    def resume(self) -> bool:
        """Continue from the newest checkpoint in :attr:`ckpt_dir` that has this :attr:`policy_id`.

        :meth:`start` then loads no other checkpoint, and makes only the rest of the
        ``train_iterations``. Damaged files are skipped.

        Returns:
            Whether there was such a checkpoint.

        Raises:
            CheckpointMismatch: if the checkpoint belongs to another model.
        """
        for path in checkpoints_in(self.ckpt_dir):
            try:
                state = load_checkpoint(path)
            except CheckpointDamaged as error:
                self.info(f"{self._instance_name} skipped a checkpoint: {error}")
                continue
            if state.get("policy_id", "") == self._policy_id:
                break
        else:
            return False
        self.load_state_dict(state)
        self._n_to_run = max(0, self._n_to_run - self.train_iter)
        before_run = self._hooks["before_run"]
        before_run[:] = [hook for hook in before_run if not isinstance(hook, LoadCkptHook)]
        self.info(f"{self._instance_name} continues from {path}")
        return True

    def info(self, s: str) -> None:
        """Write to the text log, on rank 0."""
        if self._rank == 0:
            self._logger.info("%s", s)

    def debug(self, s: str) -> None:
        """Write to the text log at level DEBUG, on rank 0."""
        if self._rank == 0:
            self._logger.debug("%s", s)

    def close(self) -> None:
        """Stop the data loader, and close the TensorBoard writer if the learner created it.

        If another thread is in :meth:`start`, its training ends in order after the current update:
        the ``after_run`` hooks run, and :meth:`start` returns.
        """
        self._closing.set()
        self._close_loader()
        if self._running is None or self._running is threading.current_thread():
            self._writer.close()
        self._threads.close()

    def _close_loader(self) -> None:
        if self._loader is not None:
            self._loader.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._instance_name!r}, iteration {self.train_iter})"

    @property
    def learn_info(self) -> dict[str, Any]:
        """The learner's progress, for a commander."""
        return {
            "learner_step": self.train_iter,
            "learner_done": self._done,
            "priority_info": self._priority_info,
            "envstep": self._collector_envstep,
            "rank": self._rank,
            "world_size": self._world_size,
        }

    @property
    def priority_info(self) -> dict[str, Any]:
        """The last priorities, with the buffer positions of their rows if the data has them."""
        return self._priority_info

    @priority_info.setter
    def priority_info(self, info: dict[str, Any]) -> None:
        self._priority_info = info

    @property
    def collector_envstep(self) -> int:
        """Env steps collected so far; -1: unknown."""
        return self._collector_envstep

    @collector_envstep.setter
    def collector_envstep(self, value: int) -> None:
        self._collector_envstep = value

    @property
    def last_iter(self) -> CountVar:
        """The counter of finished iterations."""
        return self._last_iter

    @property
    def train_iter(self) -> int:
        """Finished iterations."""
        return self._last_iter.val

    @property
    def rank(self) -> int:
        """This learner's rank."""
        return self._rank

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self._world_size

    @property
    def policy(self) -> LearnMode:
        """The policy's learn mode.

        Raises:
            ConfigError: if none was set.
        """
        if self._policy is None:
            raise _no_policy()
        return self._policy

    @policy.setter
    def policy(self, policy: HasModes | LearnMode) -> None:
        self._set_policy(policy)

    def _set_policy(self, policy: HasModes | LearnMode) -> None:
        mode = as_learn_mode(policy, user=type(self).__name__)
        self._policy = mode
        schedules = mode.spec.schedules.values()
        self._follows_env_step = any(
            one.by == "env_step" and not one.is_constant for one in schedules
        )
        if self._cfg.log_policy:
            self.info(mode.info())
        self._monitor = MovingAverages([*_TIMES, *mode.monitor_vars()], window=_WINDOW)

    @property
    def monitor(self) -> MovingAverages:
        """Moving averages of the policy's ``monitor_vars`` and of the learner's times."""
        return self._monitor

    @property
    def monitors(self) -> bool:
        """Whether this rank keeps moving averages."""
        return self._rank == 0 or not self.only_monitor_rank0

    @property
    def only_monitor_rank0(self) -> bool:
        """Whether only rank 0 keeps moving averages; never with several tasks."""
        return bool(self._cfg.only_monitor_rank0) and not self._cfg.is_multitask_pipeline

    @property
    def logs(self) -> bool:
        """Whether this rank writes logs."""
        return self._rank == 0 or bool(self._cfg.is_multitask_pipeline)

    @property
    def log_buffer(self) -> dict[str, dict[str, Any]]:
        """The values of the last iteration: ``scalar``, ``scalars`` and ``histogram``."""
        return self._log_buffer

    @log_buffer.setter
    def log_buffer(self, buffer: dict[str, dict[str, Any]]) -> None:
        self._log_buffer = buffer

    @property
    def logger(self) -> TextLog:
        """The text log."""
        return self._logger

    @property
    def tb_logger(self) -> Any:
        """The TensorBoard writer."""
        return self._writer.get()

    @property
    def ckpt_name(self) -> str | None:
        """File name of the next checkpoints; None: a name with the iteration."""
        return self._ckpt_name

    @ckpt_name.setter
    def ckpt_name(self, ckpt_name: str | None) -> None:
        self._ckpt_name = ckpt_name

    @property
    def policy_id(self) -> str:
        """The id of the policy in a coordinator's task; checkpoints contain it. Empty: no task."""
        return self._policy_id

    @policy_id.setter
    def policy_id(self, policy_id: str) -> None:
        self._policy_id = policy_id

    @property
    def ckpt_dir(self) -> Path:
        """The folder of the hooks' checkpoints, ``<exp_name>/ckpt_<instance_name>``.

        It is not ``<exp_name>/ckpt``, where ``middleware.CkptSaver`` writes.
        """
        return Path(self._exp_name) / f"ckpt_{self._instance_name}"

    @property
    def exp_name(self) -> str:
        """The output folder."""
        return self._exp_name

    @property
    def instance_name(self) -> str:
        """The name that distinguishes learners in logs and folders."""
        return self._instance_name


def _no_policy() -> ConfigError:
    return ConfigError("the learner has no policy; set `learner.policy = policy`")


def _checked_ranks(dist_info: tuple[int, int]) -> tuple[int, int]:
    try:
        rank, world_size = dist_info
        is_valid = 0 <= rank < world_size
    except (TypeError, ValueError):
        is_valid = False
    if not is_valid:
        raise ConfigError(
            f"dist_info must be (rank, world_size) with rank below world_size, got {dist_info!r}"
        )
    return dist_info


def _priority_info(outputs: list[dict[str, Any]], data: Any) -> dict[str, Any] | None:
    """Return the priorities with the buffer positions of their rows, as far as the data has them.

    Returns:
        None without priorities.
    """
    if all(output.get("priority") is None for output in outputs):
        return None
    found = priorities_of_rows(outputs, _n_drawn(data))
    assert found is not None
    rows, priority = found
    info: dict[str, Any] = {"priority": priority}
    for key in _BUFFER_KEYS:
        if isinstance(data, list):
            if data and key in data[0]:
                chosen = data if rows is None else [data[row] for row in rows.tolist()]
                info[key] = [sample[key] for sample in chosen]
        elif key in data:
            info[key] = data[key] if rows is None else data[key][rows]
    return info


def _n_drawn(data: Any) -> int:
    """Return how many rows or sequences a batch has."""
    if isinstance(data, list):
        return len(data)
    return len(data["index"]) if "index" in data else int(lead_shape(data)[0])


LEARNER_REGISTRY: Registry[Callable[..., BaseLearner]] = Registry("learner")
"""Registered learners; ``@LEARNER_REGISTRY.register("mine")`` adds one."""

LEARNER_REGISTRY.register("base")(BaseLearner)


def create_learner(cfg: Mapping[str, Any], **kwargs: Any) -> BaseLearner:
    """Build the learner that ``cfg.type`` names, after importing ``cfg.import_names``.

    Args:
        cfg: the learner's config, with ``type``.
        kwargs: passed to the class's constructor.

    Raises:
        ConfigError: if ``cfg`` has no ``type``, or if the class rejects the config.
        RegistryError: if the name is not registered; the nearest names are listed.
    """
    return get_worker_cls(LEARNER_REGISTRY, cfg, "a learner")(cfg, **kwargs)
