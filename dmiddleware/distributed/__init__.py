"""Learning in several processes: ranks with the same parameters and averaged gradients."""

from dmiddleware.distributed.agent_store import next_shared_name
from dmiddleware.distributed.ranks import (
    GradientReducer,
    broadcast_model,
    collective,
    collective_device,
    data_parallel,
    gather_from_ranks,
    largest_over_ranks,
    rank_and_world_size,
    require_process_group,
    sum_over_ranks,
)

__all__ = [
    "GradientReducer",
    "broadcast_model",
    "collective",
    "collective_device",
    "data_parallel",
    "gather_from_ranks",
    "largest_over_ranks",
    "next_shared_name",
    "rank_and_world_size",
    "require_process_group",
    "sum_over_ranks",
]
