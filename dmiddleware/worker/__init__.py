"""Workers: collect, evaluate and learn, with or without a task."""

from dmiddleware.worker.collector import RolloutCollector
from dmiddleware.worker.learner import (
    BaseLearner,
    LearnerHook,
    add_learner_hook,
    build_learner_hook_by_cfg,
    create_learner,
    merge_hooks,
    register_learner_hook,
    show_hooks,
)

__all__ = [
    "RolloutCollector",
    "BaseLearner",
    "create_learner",
    "LearnerHook",
    "register_learner_hook",
    "build_learner_hook_by_cfg",
    "add_learner_hook",
    "merge_hooks",
    "show_hooks",
]
