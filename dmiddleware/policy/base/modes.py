"""The modes of a policy: immutable tuples of the methods that a worker may call.

Workers accept a policy and keep only its mode, so a collector cannot update parameters by mistake.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TypeVar

from dmiddleware.errors import ConfigError

__all__ = [
    "CollectMode",
    "CommandMode",
    "EvalMode",
    "HasModes",
    "LearnMode",
    "as_collect_mode",
    "as_eval_mode",
    "as_learn_mode",
]

M = TypeVar("M")


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
    kind. ``seed`` seeds the randomness of acting.
    """

    forward: Callable[..., dict[Any, Any]]
    process_transition: Callable[..., Any]
    get_train_sample: Callable[[Any], Any]
    reset: Callable[..., None]
    seed: Callable[[int], None]
    get_attribute: Callable[[str], Any]
    set_attribute: Callable[[str, Any], None]
    state_dict: Callable[[], dict[str, Any]]
    load_state_dict: Callable[[dict[str, Any]], None]


class EvalMode(NamedTuple):
    """The methods that an evaluator may call.

    ``forward`` acts greedily, on per-env or batched data as in :class:`CollectMode`. ``seed`` seeds
    the randomness of acting, for policies that evaluate stochastically.
    """

    forward: Callable[..., dict[Any, Any]]
    reset: Callable[..., None]
    seed: Callable[[int], None]
    get_attribute: Callable[[str], Any]
    set_attribute: Callable[[str, Any], None]
    state_dict: Callable[[], dict[str, Any]]
    load_state_dict: Callable[[dict[str, Any]], None]


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


def as_learn_mode(policy: HasModes | LearnMode, *, user: str) -> LearnMode:
    """Return the learn mode of a policy; a learn mode is returned as it is.

    Args:
        policy: a policy or its learn mode.
        user: the name of the caller, for the error message.

    Raises:
        ConfigError: if ``policy`` is neither.
    """
    return _as_mode(policy, LearnMode, "learn_mode", user)


def as_collect_mode(policy: HasModes | CollectMode, *, user: str) -> CollectMode:
    """Return the collect mode of a policy; see :func:`as_learn_mode`."""
    return _as_mode(policy, CollectMode, "collect_mode", user)


def as_eval_mode(policy: HasModes | EvalMode, *, user: str) -> EvalMode:
    """Return the eval mode of a policy; see :func:`as_learn_mode`."""
    return _as_mode(policy, EvalMode, "eval_mode", user)


def _as_mode(policy: object, kind: type[M], name: str, user: str) -> M:
    mode = policy if isinstance(policy, kind) else getattr(policy, name, None)
    if not isinstance(mode, kind):
        raise ConfigError(
            f"{user} takes a policy or its {name}, got {type(policy).__name__}; "
            f"pass the policy itself, for example {user}(policy, ...)"
        )
    return mode
