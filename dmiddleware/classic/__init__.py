"""The interface of DI-engine's older pipeline, written on the core.

Nothing in the core imports this package.
"""

from dmiddleware.classic.battle_manager import (
    BattleEnvManager,
    BattleTimestep,
    GameResult,
    game_result,
)
from dmiddleware.classic.buffer import BufferMiddleware
from dmiddleware.classic.buffer_middleware import (
    ActionMiddleware,
    PriorityExperienceReplay,
    clone_object,
    group_sample,
    padding,
    sample_range_view,
    staleness_check,
    use_time_check,
)
from dmiddleware.classic.collate import collate
from dmiddleware.classic.deque_buffer import BufferedData, DequeBuffer
from dmiddleware.classic.deque_replay import DequeReplay
from dmiddleware.classic.modes import (
    CollectMode,
    CommandMode,
    EvalMode,
    LearnMode,
    as_collect_mode,
    as_command_mode,
    as_eval_mode,
    as_learn_mode,
)
from dmiddleware.classic.policy import CommandModePolicy, Policy
from dmiddleware.classic.replay_buffers import (
    BUFFER_REGISTRY,
    AdvancedReplayBuffer,
    DequeBufferWrapper,
    ElasticReplayBuffer,
    EpisodeReplayBuffer,
    IBuffer,
    NaiveReplayBuffer,
    PolicyAndValueBuffer,
    SequenceReplayBuffer,
    create_buffer,
    get_buffer_cls,
)
from dmiddleware.classic.stock import StockPolicy, create_policy, get_policy_cls

__all__ = [
    "CollectMode",
    "CommandMode",
    "CommandModePolicy",
    "EvalMode",
    "LearnMode",
    "Policy",
    "StockPolicy",
    "as_collect_mode",
    "as_command_mode",
    "as_eval_mode",
    "as_learn_mode",
    "collate",
    "create_policy",
    "get_policy_cls",
    "DequeBuffer",
    "BufferedData",
    "DequeReplay",
    "BufferMiddleware",
    "ActionMiddleware",
    "PriorityExperienceReplay",
    "clone_object",
    "staleness_check",
    "use_time_check",
    "group_sample",
    "padding",
    "sample_range_view",
    "IBuffer",
    "NaiveReplayBuffer",
    "ElasticReplayBuffer",
    "SequenceReplayBuffer",
    "EpisodeReplayBuffer",
    "AdvancedReplayBuffer",
    "PolicyAndValueBuffer",
    "DequeBufferWrapper",
    "BUFFER_REGISTRY",
    "create_buffer",
    "get_buffer_cls",
    "BattleEnvManager",
    "BattleTimestep",
    "GameResult",
    "game_result",
]
