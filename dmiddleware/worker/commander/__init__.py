"""Commanders: decide how to collect, and what the workers of a coordinator do."""

from dmiddleware.worker.commander.base import (
    COMMANDER_REGISTRY,
    BaseParallelCommander,
    TaskSpace,
    create_parallel_commander,
    get_parallel_commander_cls,
)
from dmiddleware.worker.commander.naive_commander import NaiveCommander
from dmiddleware.worker.commander.serial_commander import BaseSerialCommander

__all__ = [
    "BaseSerialCommander",
    "BaseParallelCommander",
    "NaiveCommander",
    "TaskSpace",
    "COMMANDER_REGISTRY",
    "create_parallel_commander",
    "get_parallel_commander_cls",
]
