"""The classic replay buffers, by the names that DI-engine's users know."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dmiddleware.classic.import_names import import_named
from dmiddleware.classic.replay_buffers.advanced_buffer import AdvancedReplayBuffer
from dmiddleware.classic.replay_buffers.deque_buffer_wrapper import DequeBufferWrapper
from dmiddleware.classic.replay_buffers.episode_buffer import EpisodeReplayBuffer
from dmiddleware.classic.replay_buffers.naive_buffer import ElasticReplayBuffer, NaiveReplayBuffer
from dmiddleware.classic.replay_buffers.policy_and_value_buffer import PolicyAndValueBuffer
from dmiddleware.classic.replay_buffers.replay_buffer import IBuffer
from dmiddleware.classic.replay_buffers.sequence_buffer import SequenceReplayBuffer
from dmiddleware.registry import Registry

__all__ = [
    "BUFFER_REGISTRY",
    "AdvancedReplayBuffer",
    "DequeBufferWrapper",
    "ElasticReplayBuffer",
    "EpisodeReplayBuffer",
    "IBuffer",
    "NaiveReplayBuffer",
    "PolicyAndValueBuffer",
    "SequenceReplayBuffer",
    "create_buffer",
    "get_buffer_cls",
]

BUFFER_REGISTRY: Registry[type[IBuffer]] = Registry("replay buffer")
"""Registered replay buffers; ``@BUFFER_REGISTRY.register("mine")`` adds one."""

BUFFER_REGISTRY.register("naive")(NaiveReplayBuffer)
BUFFER_REGISTRY.register("elastic")(ElasticReplayBuffer)
BUFFER_REGISTRY.register("sequence")(SequenceReplayBuffer)
BUFFER_REGISTRY.register("episode")(EpisodeReplayBuffer)
BUFFER_REGISTRY.register("advanced")(AdvancedReplayBuffer)
BUFFER_REGISTRY.register("deque")(DequeBufferWrapper)
BUFFER_REGISTRY.register("policy_and_value")(PolicyAndValueBuffer)


def create_buffer(cfg: Mapping[str, Any], *args: Any, **kwargs: Any) -> IBuffer:
    """Build the replay buffer that ``cfg.type`` names, after importing ``cfg.import_names``.

    Args:
        cfg: the buffer's config; without ``type``, that of an :class:`AdvancedReplayBuffer`.
        args: for the constructor, after the config.
        kwargs: for the constructor.

    Raises:
        RegistryError: if the name is not registered; the nearest names are listed.
        ConfigError: for an unusable config.
    """
    return get_buffer_cls(cfg)(cfg, *args, **kwargs)


def get_buffer_cls(cfg: Mapping[str, Any]) -> type[IBuffer]:
    """Return the class that ``cfg.type`` names, after importing ``cfg.import_names``.

    Raises:
        RegistryError: if the name is not registered; the nearest names are listed.
    """
    import_named(cfg.get("import_names"))
    return BUFFER_REGISTRY.get(cfg.get("type", "advanced"))
