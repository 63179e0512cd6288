"""Collectors: a policy acts in envs, and what happens becomes training data."""

from dmiddleware.worker.collector.rollout import RolloutCollector

__all__ = ["RolloutCollector"]
