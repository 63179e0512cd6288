"""The face of ``ding.framework``: the global task, contexts, events, and processes."""

from typing import Final

from dmiddleware.ding.framework.context import Context, OfflineRLContext, OnlineRLContext
from dmiddleware.ding.framework.events import EventLoop
from dmiddleware.ding.framework.global_task import Task, VoidMiddleware, task
from dmiddleware.ding.framework.parallel import Parallel
from dmiddleware.ding.program import run_folder
from dmiddleware.pipeline import StepTimer

__all__ = [
    "Context",
    "EventLoop",
    "OfflineRLContext",
    "OnlineRLContext",
    "Parallel",
    "StepTimer",
    "Task",
    "VoidMiddleware",
    "ding_init",
    "task",
]

REFUSED: Final = {
    "Supervisor": "it steps envs in threads and processes; use EnvSupervisor of ding.envs",
}


def ding_init(cfg: object) -> None:
    """Open the folder of the run, ``cfg.exp_name``, for the loggers of the chain."""
    run_folder(cfg.exp_name)  # type: ignore[attr-defined]
