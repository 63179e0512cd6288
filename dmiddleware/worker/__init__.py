"""Workers: collect, evaluate and learn, with or without a task."""

from dmiddleware.worker.collector import RolloutCollector

__all__ = ["RolloutCollector"]
