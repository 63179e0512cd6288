"""Savers, loggers, limits and exchanges with DI-engine's arguments."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dmiddleware.ding.program import policy_of, run_folder, task_folder
from dmiddleware.pipeline import Task
from middleware import ContextExchanger as CoreContextExchanger
from middleware import (
    EpochTimer,
    FinalCtxSaver,
    MetricsLogger,
    Role,
    TerminationChecker,
    WandbLogger,
)
from middleware import ModelExchanger as CoreModelExchanger
from middleware.base import BaseMiddleware
from middleware.context import RLContext

__all__ = [
    "CkptSaver",
    "ContextExchanger",
    "ModelExchanger",
    "PeriodicalModelExchanger",
    "ddp_termination_checker",
    "epoch_timer",
    "final_ctx_saver",
    "offline_logger",
    "online_logger",
    "termination_checker",
    "wandb_offline_logger",
    "wandb_online_logger",
]


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


def online_logger(record_train_iter: bool = False, train_show_freq: int = 100) -> MetricsLogger:
    """Write metrics to the run's folder every ``train_show_freq`` updates."""
    return MetricsLogger(run_folder(), every_train_iter=train_show_freq)


def offline_logger(train_show_freq: int = 100) -> MetricsLogger:
    """Write metrics to the run's folder every ``train_show_freq`` updates."""
    return MetricsLogger(run_folder(), every_train_iter=train_show_freq)


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


def ContextExchanger(  # noqa: N802 (DI-engine's name)
    skip_n_iter: int = 1, storage_loader: Any = None
) -> CoreContextExchanger:
    """Send what is collected to the learner, and its counters back.

    Args:
        skip_n_iter: no effect: a process waits for what it needs.
        storage_loader: no effect: large data travel in shared memory.
    """
    return CoreContextExchanger()


def ModelExchanger(  # noqa: N802 (DI-engine's name)
    model: nn.Module, model_loader: Any = None
) -> CoreModelExchanger:
    """Send the learner's weights to the others.

    Args:
        model: the policy's network.
        model_loader: no effect: large weights travel in shared memory.
    """
    return CoreModelExchanger(policy_of(model))


def PeriodicalModelExchanger(  # noqa: N802 (DI-engine's name)
    model: nn.Module,
    mode: str = "send",
    period: int = 1,
    delay_toleration: float = float("inf"),
    stale_toleration: int = 1,
    event_name: str = "model_exchanger",
    model_loader: Any = None,
) -> CoreModelExchanger:
    """Send the learner's weights every ``period`` updates."""
    return CoreModelExchanger(policy_of(model), every_train_iter=max(1, period))
