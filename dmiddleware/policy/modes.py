"""What a worker may do with a policy: immutable tuples of bound methods, one per mode.

A worker gets a mode and never the policy, so a collector cannot update parameters by mistake.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

__all__ = ["CollectMode", "CommandMode", "EvalMode", "LearnMode"]


class LearnMode(NamedTuple):
    """What a learner may do.

    ``forward(batch) -> dict`` makes one update (or several) from a treetensor ``[B, …]`` or a list
    of samples and returns native scalars, and maybe ``priority``, float32 ``[B]``.
    """

    forward: Callable[..., dict[str, Any]]
    reset: Callable[..., None]
    info: Callable[[], str]
    monitor_vars: Callable[[], list[str]]
    get_attribute: Callable[[str], Any]
    set_attribute: Callable[[str, Any], None]
    state_dict: Callable[[], dict[str, Any]]
    load_state_dict: Callable[[dict[str, Any]], None]


class CollectMode(NamedTuple):
    """What a collector may do.

    ``forward``, ``process_transition`` and ``get_train_sample`` take per-env data (a dict keyed by
    env id, a list of transitions) and batched data (tensors, treetensors), and answer in kind.
    """

    forward: Callable[..., dict[Any, Any]]
    process_transition: Callable[..., Any]
    get_train_sample: Callable[[Any], Any]
    reset: Callable[..., None]
    get_attribute: Callable[[str], Any]
    set_attribute: Callable[[str, Any], None]
    state_dict: Callable[[], dict[str, Any]]
    load_state_dict: Callable[[dict[str, Any]], None]


class EvalMode(NamedTuple):
    """What an evaluator may do; ``forward`` acts greedily and answers in kind, as in collecting."""

    forward: Callable[..., dict[Any, Any]]
    reset: Callable[..., None]
    get_attribute: Callable[[str], Any]
    set_attribute: Callable[[str, Any], None]
    state_dict: Callable[[], dict[str, Any]]
    load_state_dict: Callable[[dict[str, Any]], None]


class CommandMode(NamedTuple):
    """What a commander may do: turn the training's progress into arguments of the next forward."""

    get_setting_learn: Callable[[dict[str, Any]], dict[str, Any]]
    get_setting_collect: Callable[[dict[str, Any]], dict[str, Any]]
    get_setting_eval: Callable[[dict[str, Any]], dict[str, Any]]
