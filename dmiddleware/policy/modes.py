"""The modes of a policy: what a learner, a collector or an evaluator may use of it.

Workers and middleware accept a policy and keep only its mode, so a collector cannot update
parameters by mistake.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, Protocol, TypeAlias, TypeVar

import gymnasium as gym
import torch
from torch import nn

from dmiddleware.data.minibatches import MinibatchUnit
from dmiddleware.errors import ConfigError
from dmiddleware.schedule import Counters, Schedule
from dmiddleware.tree import Batch, Nested

__all__ = [
    "ActingMode",
    "CollectMode",
    "EvalMode",
    "MODES",
    "HasModes",
    "LearnMode",
    "Mode",
    "PolicySpec",
    "as_collect_mode",
    "as_eval_mode",
    "AnyMode",
    "as_learn_mode",
    "spec_of",
]

Mode: TypeAlias = Literal["learn", "collect", "eval"]

MODES: Final[tuple[Mode, ...]] = ("learn", "collect", "eval")
"""What a policy can be for."""


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Do nothing, and return None: the policy has nothing of this kind."""


def _unscaled(batch: Batch) -> torch.Tensor:
    reward: torch.Tensor = batch["reward"]
    return reward


def _as_it_is(batch: Batch) -> Batch:
    return batch


@dataclass(frozen=True, kw_only=True)
class PolicySpec:
    """What others read of a policy: the settings of which it is the home, and its needs.

    Attributes:
        kind: the class of the policy.
        settings: what else is set in the policy, as attributes, such as ``batch_size``.
        device: where its model is.
        model: its model; None: a policy that does not say.
        has_own_model: whether the model was passed as a module, so the settings do not describe it.
        spaces: returns those of observations and actions; None: no env is known yet.
        on_policy: whether it learns only from actions that its own distribution drew.
        discount: γ, of future rewards; None: the algorithm has none.
        n_step: number of rewards that a buffer sums up before a target bootstraps.
        gae_lambda: λ of generalized advantage estimation; None: the algorithm has none.
        seed: of the initial weights and of acting; None: torch's.
        uses_ranks: whether it averages gradients over the ranks of ``torch.distributed``.
        schedules: the settings that may be schedules, by name.
        scale_rewards: returns the rewards from which a batch's returns and advantages are computed;
            called once for each batch, in the learner's process.
        observe_returns: takes the returns ``[…]`` of a collected batch, and its observations where
            they are known, once, before learning from it.
        add_targets: takes the collected rows ``[T, …]`` or ``[T, E, …]`` of an algorithm that
            learns from trajectories, and returns them with the columns that its minibatches need;
            called once for each batch, in the learner's process.
        check_returns: takes discounted returns of an env's rewards, see
            :meth:`C51Policy.check_returns`; None: the policy learns any.
        value_fn: observations ``[N, …]`` to values ``[N]``; None: the policy has no critic of them.
        set_counters: sets the counters that schedules read.
        acting_state: returns what acting needs, as the state of the other modes.
    """

    kind: type = object
    settings: object = None
    device: str = "cpu"
    model: nn.Module | None = None
    has_own_model: bool = False
    spaces: Callable[[], tuple[gym.Space[Any], gym.Space[Any]] | None] = _nothing
    on_policy: bool = False
    discount: float | None = None
    n_step: int = 1
    gae_lambda: float | None = None
    seed: int | None = None
    uses_ranks: bool = False
    schedules: Mapping[str, Schedule] = field(default_factory=dict)
    learn_columns: tuple[str, ...] = ()
    optional_columns: tuple[str, ...] | None = None
    minibatch_unit: MinibatchUnit = "rows"
    learns_from_trajectories: bool = False
    act_inputs: tuple[str, ...] = ()
    explores: bool = True
    is_stochastic: bool = False
    initial_state: Callable[[int], Nested | None] = _nothing
    check_spaces: Callable[[gym.Space[Any], gym.Space[Any]], None] = _nothing
    scale_rewards: Callable[[Batch], torch.Tensor] = _unscaled
    observe_returns: Callable[..., None] = _nothing
    add_targets: Callable[[Batch], Batch] = _as_it_is
    check_returns: Callable[..., None] | None = None
    value_fn: Callable[..., torch.Tensor] | None = None
    set_counters: Callable[[Counters], None] = _nothing
    acting_state: Callable[[], dict[str, Any]] = dict
    load_weights: Callable[[Mapping[str, torch.Tensor]], None] = _nothing


@dataclass(frozen=True)
class LearnMode:
    """What a learner may use of a policy.

    ``forward(batch)`` makes one or several updates from a treetensor ``[B, …]``. It returns a
    dictionary of Python numbers, or a list of dictionaries, one per update. An output with
    ``kl_stop=True`` is not an update: its minibatch made no step.

    An output may have ``priority``, float32 ``[b]``, the new priorities of the ``b`` rows of its
    minibatch, and ``priority_index``, int64 ``[b]``, the positions of these rows in the batch.
    Without ``priority_index``, the priorities are for all rows of the batch, or, in a list of
    outputs, for the rows that follow the rows of the previous output. See
    :func:`priorities_of_rows`.

    Attributes:
        forward: makes updates.
        state_dict: returns everything that is needed to resume.
        load_state_dict: restores it.
        spec: what the policy is.
    """

    forward: Callable[..., Mapping[str, Any] | list[Mapping[str, Any]]]
    state_dict: Callable[[], dict[str, Any]]
    load_state_dict: Callable[[dict[str, Any]], None]
    spec: PolicySpec


@dataclass(frozen=True)
class ActingMode:
    """What whoever acts may use of a policy: :class:`CollectMode` or :class:`EvalMode`.

    Attributes:
        forward: acts: observations ``[E, …]`` to tensors ``[E, …]`` by name, with at least
            ``action``. It takes ``env_id``, ``[E]``, and the keywords of the policy.
        state_dict: returns what acting needs.
        load_state_dict: restores it.
        spec: what the policy is.
        reset: forgets what the policy keeps of these envs; None: of all.
        seed: seeds the randomness of acting.
    """

    forward: Callable[..., dict[str, Any]]
    state_dict: Callable[[], dict[str, Any]]
    load_state_dict: Callable[[dict[str, Any]], None]
    spec: PolicySpec
    reset: Callable[..., None] = _nothing
    seed: Callable[[int], object] = _nothing


@dataclass(frozen=True)
class CollectMode(ActingMode):
    """What a collector may use of a policy; its forward explores.

    Attributes:
        train_batch: turns a collected batch into training data.
        transitions: ``(obs, output, timestep, rows)`` to the columns of these rows of a step, in
            place of the standard ones; None: the standard ones.
        step_together: says that forward will act in all envs of a device at once, so it is worth
            compiling, if the settings ask for that.
    """

    train_batch: Callable[[Batch], Batch] = _as_it_is
    step_together: Callable[[], None] = _nothing
    transitions: Callable[..., Batch] | None = None


@dataclass(frozen=True)
class EvalMode(ActingMode):
    """What an evaluator may use of a policy; its forward acts greedily.

    Policies with a distribution over actions take ``forward(obs, deterministic=False)``, which
    draws actions from a generator of its own, so evaluations do not change what is collected.
    """


class HasModes(Protocol):
    """A policy: an object with the three modes."""

    @property
    def learn_mode(self) -> LearnMode:
        """What a learner may use."""
        ...

    @property
    def collect_mode(self) -> CollectMode:
        """What a collector may use."""
        ...

    @property
    def eval_mode(self) -> EvalMode:
        """What an evaluator may use."""
        ...


M = TypeVar("M", LearnMode, CollectMode, EvalMode)


AnyMode: TypeAlias = HasModes | LearnMode | CollectMode | EvalMode
"""A policy, or one of its modes."""


def as_learn_mode(policy: HasModes | LearnMode, *, user: str) -> LearnMode:
    """Return the learn mode of a policy; a learn mode is returned as it is.

    Args:
        policy: a policy or its learn mode.
        user: the name of the caller, for the error message.

    Raises:
        ConfigError: if ``policy`` is neither.
    """
    return _mode_of(policy, LearnMode, "learn_mode", user)


def as_collect_mode(policy: HasModes | CollectMode, *, user: str) -> CollectMode:
    """Return the collect mode of a policy; see :func:`as_learn_mode`."""
    return _mode_of(policy, CollectMode, "collect_mode", user)


def as_eval_mode(policy: HasModes | EvalMode, *, user: str) -> EvalMode:
    """Return the eval mode of a policy; see :func:`as_learn_mode`."""
    return _mode_of(policy, EvalMode, "eval_mode", user)


def spec_of(policy: AnyMode, *, user: str) -> PolicySpec:
    """Return what others read of a policy, of any of its modes.

    Args:
        policy: a policy or one of its modes.
        user: the name of the caller, for the error message.

    Raises:
        ConfigError: if ``policy`` is neither.
    """
    if isinstance(policy, LearnMode | CollectMode | EvalMode):
        return policy.spec
    return as_learn_mode(policy, user=user).spec


def _mode_of(policy: Any, kind: type[M], name: str, user: str) -> M:
    mode = getattr(policy, name, policy)
    if not isinstance(mode, kind):
        raise ConfigError(
            f"{user} takes a policy or its {name}, got {type(policy).__name__}; "
            f"pass the policy itself, for example {user}(policy, ...)"
        )
    return mode
