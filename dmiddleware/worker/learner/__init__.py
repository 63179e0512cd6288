"""Learners: train a policy, with hooks around each iteration and around the run."""

from dmiddleware.worker.learner.averages import MovingAverages
from dmiddleware.worker.learner.base import BaseLearner
from dmiddleware.worker.learner.counter import CountVar
from dmiddleware.worker.learner.hook_building import (
    add_learner_hook,
    build_learner_hook_by_cfg,
    merge_hooks,
    register_learner_hook,
    show_hooks,
)
from dmiddleware.worker.learner.hooks import (
    Hook,
    LearnerHook,
    LoadCkptHook,
    LogReduceHook,
    LogShowHook,
    SaveCkptHook,
)
from dmiddleware.worker.learner.registry import LEARNER_REGISTRY, create_learner

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
