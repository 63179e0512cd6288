"""The classic workers: collectors, evaluators and learners, with or without a task."""

from dmiddleware.worker.collector import (
    BaseParallelCollector,
    EpisodeSerialCollector,
    ISerialCollector,
    SampleSerialCollector,
    ZerglingParallelCollector,
    create_parallel_collector,
    create_serial_collector,
    get_parallel_collector_cls,
    get_serial_collector_cls,
    to_tensor_transitions,
)
from dmiddleware.worker.commander import (
    BaseParallelCommander,
    NaiveCommander,
    create_parallel_commander,
    get_parallel_commander_cls,
)
from dmiddleware.worker.evaluator import (
    InteractionSerialEvaluator,
    ISerialEvaluator,
    VectorEvalMonitor,
    create_serial_evaluator,
)
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
    "ISerialCollector",
    "SampleSerialCollector",
    "EpisodeSerialCollector",
    "create_serial_collector",
    "get_serial_collector_cls",
    "to_tensor_transitions",
    "ISerialEvaluator",
    "InteractionSerialEvaluator",
    "VectorEvalMonitor",
    "create_serial_evaluator",
    "BaseLearner",
    "create_learner",
    "LearnerHook",
    "register_learner_hook",
    "build_learner_hook_by_cfg",
    "add_learner_hook",
    "merge_hooks",
    "show_hooks",
    "BaseParallelCommander",
    "NaiveCommander",
    "create_parallel_commander",
    "get_parallel_commander_cls",
    "BaseParallelCollector",
    "ZerglingParallelCollector",
    "create_parallel_collector",
    "get_parallel_collector_cls",
]
