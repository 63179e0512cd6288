"""Savers, loggers, limits and exchanges with DI-engine's arguments."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import torch

from dmiddleware.ding.program import run_folder, task_folder
from dmiddleware.ding.utils.system import DistributedWriter
from dmiddleware.pipeline import Task
from middleware import (
    EpochTimer,
    FinalCtxSaver,
    MetricsLogger,
    Role,
    TerminationChecker,
    WandbLogger,
)
from middleware.base import BaseMiddleware
from middleware.context import RLContext

__all__ = [
    "CkptSaver",
    "ddp_termination_checker",
    "epoch_timer",
    "final_ctx_saver",
    "offline_logger",
    "online_logger",
    "termination_checker",
    "wandb_offline_logger",
    "wandb_online_logger",
]

_PRIORITIES: Final = ("priority", "td_error_priority")
"""Outputs of an update that are not metrics."""


class CkptSaver(BaseMiddleware[RLContext]):
    """Save the policy where DI-engine's programs look for it: ``<save_dir>/ckpt/*.pth.tar``.

    ``iteration_<n>`` is written at an interval, ``eval`` after the best evaluation so far, and
    ``final`` at the end. Each file has the state of the learn mode, with the network's as
    ``"model"``.

    Args:
        policy: the policy.
        save_dir: the folder of the run, or its folder ``ckpt``.
        train_freq: updates from one periodic file to the next; None: no such files.
        save_finish: whether to write the last one.
    """

    roles = (Role.LEARNER,)
    lead_only = True
    reads = ("train_iter",)
    last_step = True

    def __init__(
        self, policy: Any, save_dir: str, train_freq: int | None = None, save_finish: bool = True
    ) -> None:
        path = Path(save_dir)
        self._policy = policy
        self._folder = path if path.name == "ckpt" else task_folder(save_dir) / "ckpt"
        self._train_freq = train_freq
        self._save_finish = save_finish
        self._saved_iter = -1
        self._best = -math.inf
        self._is_set_up = False
        self.owns = (self._folder.absolute(),)

    def setup(self, task: Task[Any]) -> None:
        """Make the folder."""
        self._folder.mkdir(parents=True, exist_ok=True)
        self._is_set_up = True

    def __call__(self, ctx: RLContext) -> Iterator[None]:
        """Save on the way back."""
        yield
        if ctx.eval_value is not None and ctx.eval_value > self._best:
            self._best = float(ctx.eval_value)
            self._write("eval")
        since = ctx.train_iter - self._saved_iter
        if self._train_freq and (self._saved_iter < 0 or since >= self._train_freq):
            self._saved_iter = ctx.train_iter
            self._write(f"iteration_{ctx.train_iter}")

    def close(self) -> None:
        """Save the final state, also after an error."""
        if self._is_set_up and self._save_finish:
            self._write("final")
        self._is_set_up = False

    def _write(self, name: str) -> None:
        torch.save(self._policy.learn_mode.state_dict(), self._folder / f"{name}.pth.tar")

    def state_dict(self) -> dict[str, Any]:
        """Return what was saved last."""
        return {"saved_iter": self._saved_iter, "best": self._best}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        self._saved_iter, self._best = int(state["saved_iter"]), float(state["best"])


class WriterLogger(BaseMiddleware[RLContext]):
    """Writes evaluations and updates to the writer that a program has made, with DI-engine's tags.

    Args:
        writer: has ``add_scalar``, ``add_histogram`` and ``close``.
        counters: the suffix of the tags by the counter that is their step.
        every_train_iter: updates from one that is written to the next.
    """

    roles = (Role.LEARNER,)
    lead_only = True
    reads = ("train_iter",)

    def __init__(self, writer: Any, counters: Mapping[str, str], every_train_iter: int) -> None:
        self._writer, self._counters, self._every = writer, counters, every_train_iter
        self._last = -1

    def __call__(self, ctx: RLContext) -> None:
        """Write.

        Raises:
            NotImplementedError: for several curves in one, ``[scalars]``, which have no tag.
        """
        if ctx.eval_value is not None:
            self._write(ctx, "eval_episode_return_mean", ctx.eval_value)
        output: Any = ctx.train_output
        if not output or ctx.train_iter - self._last < self._every:
            return
        self._last = ctx.train_iter
        for name, value in (output if isinstance(output, Mapping) else output[-1]).items():
            if name not in _PRIORITIES:
                self._write(ctx, f"train_{name}", value)

    def _write(self, ctx: RLContext, name: str, value: Any) -> None:
        if "[scalars]" in name:
            raise NotImplementedError(f"{name!r}: log each curve under a name of its own")
        _, is_histogram, histogram = name.partition("[histogram]")
        for counter, suffix in self._counters.items():
            step = getattr(ctx, counter)
            if is_histogram:
                self._writer.add_histogram(histogram, value, step)
            else:
                self._writer.add_scalar(f"basic/{name}{suffix}", value, step)

    def close(self) -> None:
        """Close the writer."""
        self._writer.close()


def _logger(counters: Mapping[str, str], train_show_freq: int) -> BaseMiddleware[RLContext]:
    writer = DistributedWriter.get_instance()
    if writer is None:
        return MetricsLogger(run_folder(), every_train_iter=train_show_freq)
    return WriterLogger(writer, counters, train_show_freq)


def online_logger(
    record_train_iter: bool = False, train_show_freq: int = 100
) -> BaseMiddleware[RLContext]:
    """Write metrics every ``train_show_freq`` updates, to the program's writer or run folder.

    Args:
        record_train_iter: whether a writer gets each metric by updates, too, and not only by env
            steps.
        train_show_freq: updates from one that is written to the next.
    """
    by_both = {"env_step": "-env_step", "train_iter": "-train_iter"}
    return _logger(by_both if record_train_iter else {"env_step": ""}, train_show_freq)


def offline_logger(train_show_freq: int = 100) -> BaseMiddleware[RLContext]:
    """Write metrics every ``train_show_freq`` updates, to the program's writer or run folder."""
    return _logger({"train_iter": "-train_iter"}, train_show_freq)


def wandb_online_logger(
    record_path: str | None = None,
    cfg: Any = None,
    exp_config: Any = None,
    metric_list: Any = None,
    env: Any = None,
    model: Any = None,
    anonymous: bool = False,
    project_name: str = "default-project",
    run_name: str | None = None,
    wandb_sweep: bool = False,
) -> WandbLogger:
    """Send the run's metrics to Weights and Biases.

    Args:
        record_path: no effect: videos are in the run's folder.
        cfg: no effect: what to send is what the run logs.
        exp_config: no effect: the config is in the run's folder.
        metric_list: no effect: all metrics are sent.
        env: no effect.
        model: no effect.
        anonymous: no effect.
        project_name: the project.
        run_name: no effect: the name is that of the run's folder.
        wandb_sweep: no effect.
    """
    return WandbLogger(run_folder(), project=project_name)


wandb_offline_logger = wandb_online_logger


def termination_checker(
    max_env_step: float | None = None, max_train_iter: float | None = None
) -> TerminationChecker:
    """Stop the run at a limit of env steps or of updates."""
    return TerminationChecker(
        max_env_step=None if max_env_step is None else int(max_env_step),
        max_train_iter=None if max_train_iter is None else int(max_train_iter),
    )


def ddp_termination_checker(
    max_env_step: float | None = None, max_train_iter: float | None = None, rank: int = 0
) -> TerminationChecker:
    """Stop the ranks of a run together at a limit."""
    return termination_checker(max_env_step, max_train_iter)


def epoch_timer(print_per: int = 1, smooth_window: int = 10) -> EpochTimer:
    """Log how long steps take."""
    return EpochTimer()


def final_ctx_saver(name: str) -> FinalCtxSaver:
    """Save the last context to the run's folder."""
    return FinalCtxSaver(run_folder(name))
