"""Batches, replay buffers, offline datasets and checkpoints."""

from dmiddleware.data.hindsight import GoalFunction, HindsightReplay, HindsightReplaySettings
from dmiddleware.data.minibatches import (
    MinibatchUnit,
    minibatches,
    n_minibatches,
    select_columns,
)
from dmiddleware.data.mixed_replay import MixedReplay, MixedReplaySettings
from dmiddleware.data.replay_buffer import ReplayBuffer
from dmiddleware.data.samplers import (
    Eligible,
    PrioritySampler,
    PrioritySamplerSettings,
    Sampler,
    UniformSampler,
    UniformSamplerSettings,
)
from dmiddleware.data.tensor_buffer import SampleTransform, TensorBuffer, TensorBufferSettings
from dmiddleware.files.checkpoint import (
    check_saveable,
    convert_checkpoint,
    load_checkpoint,
    pack_checkpoint,
    save_checkpoint,
    unpack_checkpoint,
)
from dmiddleware.files.minari import load_minari, save_minari
from dmiddleware.files.offline_dataset import Minibatches, OfflineDataset, save_dataset
from dmiddleware.files.recorded_rows import load_rows
from dmiddleware.files.state_blocks import BlockFolder
from dmiddleware.tree import (
    Batch,
    Nested,
    as_tree,
    cat,
    flatten_lead,
    from_numpy,
    index_rows,
    lead_shape,
    leaves,
    map_leaves,
    nest,
    stack,
    to_device,
    to_dict,
    to_numpy,
)

__all__ = [
    "Batch",
    "Nested",
    "as_tree",
    "from_numpy",
    "to_numpy",
    "to_dict",
    "to_device",
    "leaves",
    "nest",
    "map_leaves",
    "lead_shape",
    "flatten_lead",
    "index_rows",
    "cat",
    "stack",
    "ReplayBuffer",
    "TensorBuffer",
    "TensorBufferSettings",
    "SampleTransform",
    "MixedReplay",
    "MixedReplaySettings",
    "HindsightReplay",
    "HindsightReplaySettings",
    "GoalFunction",
    "Sampler",
    "Eligible",
    "UniformSampler",
    "UniformSamplerSettings",
    "PrioritySampler",
    "PrioritySamplerSettings",
    "BlockFolder",
    "check_saveable",
    "convert_checkpoint",
    "load_checkpoint",
    "MinibatchUnit",
    "minibatches",
    "n_minibatches",
    "select_columns",
    "OfflineDataset",
    "Minibatches",
    "save_dataset",
    "load_minari",
    "load_rows",
    "save_minari",
    "save_checkpoint",
    "pack_checkpoint",
    "unpack_checkpoint",
]
