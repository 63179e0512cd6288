"""Commanders: decide how to collect, and what the workers of a coordinator do."""

from dmiddleware.worker.commander.base import (
    COMMANDER_REGISTRY,
    BaseParallelCommander,
    TaskSpace,
    create_parallel_commander,
    get_parallel_commander_cls,
)
from dmiddleware.worker.commander.naive_commander import NaiveCommander
from dmiddleware.worker.commander.one_vs_one_commander import OneVsOneCommander
from dmiddleware.worker.commander.serial_commander import BaseSerialCommander
from dmiddleware.worker.commander.solo_commander import SoloCommander

__all__ = [
    "BaseSerialCommander",
    "BaseParallelCommander",
    "NaiveCommander",
    "SoloCommander",
    "OneVsOneCommander",
    "TaskSpace",
    "COMMANDER_REGISTRY",
    "create_parallel_commander",
    "get_parallel_commander_cls",
]
