"""The modes of a policy: immutable tuples of the methods that a worker may call.

Workers accept a policy and keep only its mode, so a collector cannot update parameters by mistake.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

__all__ = [
    "CollectMode",
    "CommandMode",
    "EvalMode",
    "HasModes",
    "LearnMode",
]


def _seed_nothing(seed: int) -> None:
    """Ignore the seed: the mode has no randomness of its own."""


class LearnMode(NamedTuple):
    """The methods that a learner may call.

    ``forward(batch)`` makes one or several updates from a treetensor ``[B, …]`` or a list of
    samples. It returns a dictionary of Python numbers, or a list of dictionaries, one per update.
    An output with ``kl_stop=True`` is not an update: its minibatch made no step.

    An output may have ``priority``, float32 ``[b]``, the new priorities of the ``b`` rows of its
    minibatch, and ``priority_index``, int64 ``[b]``, the positions of these rows in the batch.
    Without ``priority_index``, the priorities are for all rows of the batch, or, in a list of
    outputs, for the rows after those of the previous output. See :func:`priorities_of_rows`.
    """

    forward: Callable[..., dict[str, Any] | list[dict[str, Any]]]
    reset: Callable[..., None]
    info: Callable[[], str]
    monitor_vars: Callable[[], list[str]]
    get_attribute: Callable[[str], Any]
    set_attribute: Callable[[str, Any], None]
    state_dict: Callable[[], dict[str, Any]]
    load_state_dict: Callable[[dict[str, Any]], None]


class CollectMode(NamedTuple):
    """The methods that a collector may call.

    ``forward``, ``process_transition`` and ``get_train_sample`` take per-env data (a dict keyed by
    env id, a list of transitions) and batched data (tensors, treetensors), and return the same
    kind. ``seed`` seeds the randomness of acting while collecting.
    """

    forward: Callable[..., dict[Any, Any]]
    process_transition: Callable[..., Any]
    get_train_sample: Callable[[Any], Any]
    reset: Callable[..., None]
    get_attribute: Callable[[str], Any]
    set_attribute: Callable[[str, Any], None]
    state_dict: Callable[[], dict[str, Any]]
    load_state_dict: Callable[[dict[str, Any]], None]
    seed: Callable[[int], None] = _seed_nothing


class EvalMode(NamedTuple):
    """The methods that an evaluator may call.

    ``forward`` acts greedily, on per-env or batched data as in :class:`CollectMode`; policies with
    a distribution over actions draw from it with ``deterministic=False``, from a generator of its
    own, so that evaluations do not change what is collected. ``seed`` seeds this generator.
    """

    forward: Callable[..., dict[Any, Any]]
    reset: Callable[..., None]
    get_attribute: Callable[[str], Any]
    set_attribute: Callable[[str, Any], None]
    state_dict: Callable[[], dict[str, Any]]
    load_state_dict: Callable[[dict[str, Any]], None]
    seed: Callable[[int], None] = _seed_nothing


class CommandMode(NamedTuple):
    """The methods that a commander may call; each turns progress into arguments of a forward."""

    get_setting_learn: Callable[[dict[str, Any]], dict[str, Any]]
    get_setting_collect: Callable[[dict[str, Any]], dict[str, Any]]
    get_setting_eval: Callable[[dict[str, Any]], dict[str, Any]]


class HasModes(Protocol):
    """A policy: an object with the three modes."""

    @property
    def learn_mode(self) -> LearnMode:
        """The methods of the learn mode."""
        ...

    @property
    def collect_mode(self) -> CollectMode:
        """The methods of the collect mode."""
        ...

    @property
    def eval_mode(self) -> EvalMode:
        """The methods of the eval mode."""
        ...
