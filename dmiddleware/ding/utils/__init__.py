"""The face of ``ding.utils``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, TypeVar

from dmiddleware.classic import BUFFER_REGISTRY
from dmiddleware.ding.program import remember_seed
from dmiddleware.ding.registries import (
    ENV_REGISTRY,
    ENV_WRAPPER_REGISTRY,
    LEAGUE_REGISTRY,
    PLAYER_REGISTRY,
    REWARD_MODEL_REGISTRY,
    OldRegistry,
)
from dmiddleware.ding.utils.collections import *  # noqa: F403
from dmiddleware.ding.utils.data import DATASET_REGISTRY
from dmiddleware.ding.utils.ranks import *  # noqa: F403
from dmiddleware.ding.utils.system import *  # noqa: F403
from dmiddleware.model import MODEL_REGISTRY
from dmiddleware.policy import POLICY_REGISTRY
from dmiddleware.seeding import seed_libraries
from dmiddleware.worker import EasyTimer as EasyTimer
from dmiddleware.worker import get_task_uid as get_task_uid
from dmiddleware.worker.collector.parallel.base import PARALLEL_COLLECTOR_REGISTRY
from dmiddleware.worker.collector.serial_collector import SERIAL_COLLECTOR_REGISTRY
from dmiddleware.worker.comm.base_collector import COMM_COLLECTOR_REGISTRY
from dmiddleware.worker.comm.base_learner import COMM_LEARNER_REGISTRY
from dmiddleware.worker.commander.base import COMMANDER_REGISTRY
from dmiddleware.worker.evaluator.serial_evaluator import SERIAL_EVALUATOR_REGISTRY
from dmiddleware.worker.learner.base_learner import LEARNER_REGISTRY

Registry = OldRegistry

registries: Final[Mapping[str, object]] = {
    "policy": POLICY_REGISTRY,
    "env": ENV_REGISTRY,
    "env_wrapper": ENV_WRAPPER_REGISTRY,
    "model": MODEL_REGISTRY,
    "reward_model": REWARD_MODEL_REGISTRY,
    "learner": LEARNER_REGISTRY,
    "serial_collector": SERIAL_COLLECTOR_REGISTRY,
    "parallel_collector": PARALLEL_COLLECTOR_REGISTRY,
    "comm_learner": COMM_LEARNER_REGISTRY,
    "comm_collector": COMM_COLLECTOR_REGISTRY,
    "commander": COMMANDER_REGISTRY,
    "league": LEAGUE_REGISTRY,
    "player": PLAYER_REGISTRY,
    "buffer": BUFFER_REGISTRY,
    "dataset": DATASET_REGISTRY,
    "serial_evaluator": SERIAL_EVALUATOR_REGISTRY,
}
"""The registries by what they register."""

SequenceType = TypeVar("SequenceType", list, tuple)  # type: ignore[type-arg]

_TIMER: Final = "use EasyTimer"
_TREES: Final = "use dmiddleware.data.PrioritySampler, whose sum tree draws by priority"
_CLUSTER: Final = "processes are started by ditask and its manifests; see docs/howto"

REFUSED: Final[Mapping[str, str]] = {
    "Scheduler": "use a dmiddleware.rl.Schedule, which any number of a config can be",
    "SegmentTree": _TREES,
    "SumSegmentTree": _TREES,
    "MinSegmentTree": _TREES,
    "build_time_helper": _TIMER,
    "Profiler": "use middleware.profiler",
    "register_profiler": "use middleware.profiler",
    "K8sLauncher": _CLUSTER,
    "OrchestratorLauncher": _CLUSTER,
    "get_operator_server_kwargs": _CLUSTER,
    "exist_operator_server": _CLUSTER,
    "pod_exec_command": _CLUSTER,
    "MQ_REGISTRY": "the messages of a run need no queue; see ditask --help",
    "ENV_MANAGER_REGISTRY": "use a class of ding.envs, or an env config's manager",
    "WORLD_MODEL_REGISTRY": "world models are not here",
    "STOCHASTIC_OPTIMIZER_REGISTRY": "the optimizers of implicit behavior cloning are not here",
    "jpeg_data_compressor": "frames are kept as they are; use frame_stack, which shares them",
    "get_data_compressor": "data are sent as they are; a run's links compress nothing",
    "get_data_decompressor": "data are sent as they are; a run's links compress nothing",
}


def set_pkg_seed(seed: int, use_cuda: bool = True) -> None:
    """Seed Python's, NumPy's and torch's global generators."""
    remember_seed(seed)
    seed_libraries(seed)
