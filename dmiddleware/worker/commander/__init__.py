"""Commanders: decide how to collect, and what the workers of a coordinator do."""

from dmiddleware.worker.commander.base import (
    COMMANDER_REGISTRY,
    BaseParallelCommander,
    TaskSpace,
    create_parallel_commander,
    get_parallel_commander_cls,
)
from dmiddleware.worker.commander.naive_commander import NaiveCommander

__all__ = [
    "BaseParallelCommander",
    "NaiveCommander",
    "TaskSpace",
    "COMMANDER_REGISTRY",
    "create_parallel_commander",
    "get_parallel_commander_cls",
]
