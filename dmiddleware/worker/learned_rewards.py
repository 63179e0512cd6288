"""Rewards that a reward model learns, in a run that a config in the classic shape describes.

``create.reward_model.type`` names the model, such as ``rnd``, ``icm`` or ``gail``, and
``main.reward_model`` has its options (:mod:`dmiddleware.classic.reward_models`).

An algorithm that learns from single rows gets the rewards of the model as it is at the update. One
that learns from advantages or returns, such as PPO, gets them before those are computed: as the
model was when the trajectory ended, scaled over that trajectory.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Final

from dmiddleware.classic import Policy
from dmiddleware.classic.modes import CollectMode
from dmiddleware.classic.reward_models import (
    BaseRewardModel,
    GailRewardModel,
    create_reward_model,
    get_reward_model_cls,
)
from dmiddleware.errors import ConfigError
from dmiddleware.settings import Count, checked

__all__ = ["EnvRewards", "LearnedRewards", "learned_rewards", "take_reward_model"]

Transition = dict[str, Any]

_KEY: Final = "reward_model"
_CLEARS_EVERY: Final = 100


class EnvRewards:
    """The rewards of the env, as they are.

    Attributes:
        n_new: how many rows are collected before anything learns from them.
    """

    n_new: int = 1

    def learn_from(self, data: list[Transition]) -> None:
        """Learn from what was collected."""

    def of(self, data: list[Transition]) -> list[Transition]:
        """Return the transitions with the rewards that the policy learns from."""
        return data

    def as_collected(self, policy: Policy) -> Policy | CollectMode:
        """Return what collects: its samples have these rewards if they hold sums of rewards."""
        return policy

    def check_unused(self, reader: str) -> None:
        """Refuse a reward model that could not change the rewards of ``reader``.

        Raises:
            ConfigError: if there is one.
        """


class LearnedRewards(EnvRewards):
    """The rewards of a reward model.

    Args:
        model: the model.
        clears_every: after how many collections it forgets what was collected.
        n_new: how many rows are collected before it learns from them.
        are_summed: whether samples hold advantages or returns, which are sums of rewards.
    """

    def __init__(
        self, model: BaseRewardModel, clears_every: int, n_new: int = 1, *, are_summed: bool
    ) -> None:
        self.n_new = n_new
        self._model = model
        self._are_summed = are_summed
        self._clears_every = clears_every
        self._n_collections = 0

    def learn_from(self, data: list[Transition]) -> None:
        """Update the model."""
        self._model.collect_data(data)
        self._model.train()
        if self._n_collections % self._clears_every == 0:
            self._model.clear_data()
        self._n_collections += 1

    def of(self, data: list[Transition]) -> list[Transition]:
        """Return the transitions with the rewards that the policy learns from."""
        return data if self._are_summed else self._estimated(data)

    def as_collected(self, policy: Policy) -> Policy | CollectMode:
        """Return what collects: its samples have these rewards if they hold sums of rewards."""
        if not self._are_summed:
            return policy
        mode = policy.collect_mode
        sampled = mode.get_train_sample
        return dataclasses.replace(
            mode, get_train_sample=lambda data: sampled(self._estimated(data))
        )

    def _estimated(self, data: list[Transition]) -> list[Transition]:
        rewarded: list[Transition] = self._model.estimate(data)
        return rewarded

    def check_unused(self, reader: str) -> None:
        """Refuse the model, of which ``reader`` would see nothing.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            f"reward_model does not reach {reader}; use middleware.RewardLearner in a chain"
        )


def take_reward_model(main: Any, create: Any) -> tuple[Any, Any, Mapping[str, Any]]:
    """Return both configs without the reward model, and its options, which may be empty.

    Raises:
        ConfigError: if the options are of a model that nothing names.
        RegistryError: if no such reward model is registered.
    """
    if not isinstance(main, Mapping) or not isinstance(create, Mapping):
        return main, create, {}  # compile_config says what they must be
    section = {**(main.get(_KEY) or {}), **(create.get(_KEY) or {})}
    if section and "type" not in section:
        raise ConfigError(
            f"{_KEY} has options but no type; name the model in create_config, for example "
            f"{_KEY}=dict(type='rnd'), or leave the options out"
        )
    if section:
        get_reward_model_cls(section)
    return _without(main), _without(create), section


def learned_rewards(section: Mapping[str, Any], policy: Policy, writer: Any) -> EnvRewards:
    """Return the rewards that the options of a reward model describe.

    Args:
        section: the options, with ``type``; empty: the rewards are those of the env.
        policy: the policy that learns from them, on whose device the model is.
        writer: a ``SummaryWriter`` for the losses of the model.

    Raises:
        ConfigError: for a wrong option.
    """
    if not section:
        return EnvRewards()
    device = str(policy.collect_mode.get_attribute("device"))
    defaults: dict[str, Any] = getattr(get_reward_model_cls(section), "default_config", dict)()
    options = {"clear_buffer_per_iters": _CLEARS_EVERY, "target_new_data_count": 1, **defaults}
    options |= section
    clears_every, n_new = (
        checked(f"{_KEY}.{name}", options[name], Count)
        for name in ("clear_buffer_per_iters", "target_new_data_count")
    )
    spec = policy.learn_mode.spec
    are_summed = spec.gae_lambda is not None or "ret" in spec.learn_columns
    model = create_reward_model(section, device, writer)
    if isinstance(model, GailRewardModel) and spec.n_step > 1:
        raise ConfigError(
            f"GAIL estimates rewards of single steps, but the policy has nstep={spec.n_step}; set "
            "nstep to 1"
        )
    return LearnedRewards(model, clears_every, n_new, are_summed=are_summed)


def _without(section: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in section.items() if name != _KEY}
