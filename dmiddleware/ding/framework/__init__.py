"""The face of ``ding.framework``: the global task, contexts, events, and processes."""

from typing import Final

from dmiddleware.ding.framework.context import Context, OfflineRLContext, OnlineRLContext
from dmiddleware.ding.framework.events import EventLoop
from dmiddleware.ding.framework.global_task import Task, VoidMiddleware, task
from dmiddleware.ding.framework.parallel import Parallel
from dmiddleware.ding.framework.supervisor import Supervisor
from dmiddleware.ding.program import run_folder
from dmiddleware.pipeline import StepTimer

__all__ = [
    "Context",
    "EventLoop",
    "OfflineRLContext",
    "OnlineRLContext",
    "Parallel",
    "StepTimer",
    "Supervisor",
    "Task",
    "VoidMiddleware",
    "ding_init",
    "task",
]

REFUSED: Final = {
    name: "processes exchange events by the router here, without a message queue; use Parallel"
    for name in ("MQ", "NNGMQ", "RedisMQ")
}


def ding_init(cfg: object) -> None:
    """Open the folder of the run, ``cfg.exp_name``, for the loggers of the chain."""
    run_folder(cfg.exp_name)  # type: ignore[attr-defined]
