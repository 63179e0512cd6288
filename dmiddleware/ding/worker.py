"""The face of ``ding.worker``: the edge's workers, replay buffers and commanders."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from dmiddleware.classic import (
    BUFFER_REGISTRY,
    AdvancedReplayBuffer,
    DequeBufferWrapper,
    ElasticReplayBuffer,
    EpisodeReplayBuffer,
    IBuffer,
    NaiveReplayBuffer,
    SequenceReplayBuffer,
    create_buffer,
    get_buffer_cls,
)
from dmiddleware.worker import *  # noqa: F403 (all of them)
from dmiddleware.worker import __all__ as _WORKERS
from dmiddleware.worker.errors import TaskFail

__all__ = [
    *_WORKERS,
    "BUFFER_REGISTRY",
    "AdvancedReplayBuffer",
    "DequeBufferWrapper",
    "ElasticReplayBuffer",
    "EpisodeReplayBuffer",
    "IBuffer",
    "NaiveReplayBuffer",
    "SequenceReplayBuffer",
    "TaskFail",
    "create_buffer",
    "get_buffer_cls",
]

_OF_COLLECTORS: Final = "a collector keeps its trajectories itself; derive from ISerialCollector"

REFUSED: Final[Mapping[str, str]] = {
    "CachePool": _OF_COLLECTORS,
    "INF": "use float('inf')",
    "TrajBuffer": _OF_COLLECTORS,
    "OperatorServer": "ditask starts the processes of a run, also below Slurm and Kubernetes",
    "ResourceManager": "the coordinator gives tasks to the worker that has been idle the longest",
}
