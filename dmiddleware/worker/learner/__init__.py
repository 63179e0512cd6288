"""Learners: train a policy, and call hooks before and after each iteration and the run."""

from dmiddleware.worker.learner.base_learner import LEARNER_REGISTRY, BaseLearner, create_learner
from dmiddleware.worker.learner.hooks import (
    Hook,
    LearnerHook,
    LoadCkptHook,
    LogReduceHook,
    LogShowHook,
    SaveCkptHook,
    add_learner_hook,
    build_learner_hook_by_cfg,
    merge_hooks,
    register_learner_hook,
    show_hooks,
)
from dmiddleware.worker.learner.statistics import CountVar, MovingAverages

__all__ = [
    "BaseLearner",
    "LEARNER_REGISTRY",
    "create_learner",
    "Hook",
    "LearnerHook",
    "LoadCkptHook",
    "SaveCkptHook",
    "LogShowHook",
    "LogReduceHook",
    "register_learner_hook",
    "build_learner_hook_by_cfg",
    "add_learner_hook",
    "merge_hooks",
    "show_hooks",
    "MovingAverages",
    "CountVar",
]
