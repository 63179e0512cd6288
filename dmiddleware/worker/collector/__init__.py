"""Serial collectors: a policy acts in envs, and its transitions become training data."""

from dmiddleware.worker.collector.battle_episode_collector import BattleEpisodeSerialCollector
from dmiddleware.worker.collector.battle_sample_collector import BattleSampleSerialCollector
from dmiddleware.worker.collector.episode_collector import EpisodeSerialCollector
from dmiddleware.worker.collector.parallel import (
    BaseParallelCollector,
    MarineParallelCollector,
    ZerglingParallelCollector,
    create_parallel_collector,
    get_parallel_collector_cls,
)
from dmiddleware.worker.collector.sample_collector import SampleSerialCollector
from dmiddleware.worker.collector.serial_collector import (
    SERIAL_COLLECTOR_REGISTRY,
    ISerialCollector,
    create_serial_collector,
    get_serial_collector_cls,
)
from dmiddleware.worker.collector.transitions import to_tensor_transitions

__all__ = [
    "ISerialCollector",
    "SampleSerialCollector",
    "EpisodeSerialCollector",
    "BattleEpisodeSerialCollector",
    "BattleSampleSerialCollector",
    "SERIAL_COLLECTOR_REGISTRY",
    "create_serial_collector",
    "get_serial_collector_cls",
    "to_tensor_transitions",
    "BaseParallelCollector",
    "MarineParallelCollector",
    "ZerglingParallelCollector",
    "create_parallel_collector",
    "get_parallel_collector_cls",
]
