"""Parallel collectors: each runs one collector task of a coordinator."""

from dmiddleware.worker.collector.parallel.base import (
    PARALLEL_COLLECTOR_REGISTRY,
    BaseParallelCollector,
    create_parallel_collector,
    get_parallel_collector_cls,
)
from dmiddleware.worker.collector.parallel.marine import MarineParallelCollector
from dmiddleware.worker.collector.parallel.zergling import ZerglingParallelCollector

__all__ = [
    "PARALLEL_COLLECTOR_REGISTRY",
    "BaseParallelCollector",
    "MarineParallelCollector",
    "ZerglingParallelCollector",
    "create_parallel_collector",
    "get_parallel_collector_cls",
]
