"""What rewards for new observations have in common."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from dmiddleware.errors import ConfigError
from dmiddleware.model.spaces import HasSpaces, ObsShape, obs_shape_of, spaces_of
from dmiddleware.policy import Component, HasModes, LearnMode, as_learn_mode
from dmiddleware.policy.obs_groups import ObsParts
from dmiddleware.policy.obs_norm import ObsNorm
from dmiddleware.reward.base import RewardModel
from dmiddleware.rl import RewardNormalizer
from dmiddleware.seeding import derive_seed
from dmiddleware.settings import Positive, checked
from dmiddleware.torch_seeding import torch_seeded
from dmiddleware.tree import Batch, Value

__all__ = ["IntrinsicReward", "settings_of", "shape_in_rows"]


class IntrinsicReward(RewardModel):
    """A reward for observations that are new, to be added to that of the environment.

    - Observations are shifted and scaled by their running mean and standard deviation, and clipped
      (Burda et al., "Exploration by Random Network Distillation", 2018, section 2.4); images too.
    - Rewards are divided by the running standard deviation of their discounted sum over an episode,
      so that one weight suits many environments. The sum of that section does not end with the
      episode.

    Both statistics take each collected batch once, before it is rewarded.

    Args:
        obs_shape: see :mod:`dmiddleware.model.spaces`.
        make_components: makes the modules with their optimizers, by name; called with torch's
            global generator seeded.
        settings: what else the run's config records.
        discount: γ of the sum of rewards.
        obs_clip: largest absolute value of a normalized observation.
        batch_size: rows per update.
        epochs: passes over the collected rows.
        device: the device of the modules.
        seed: of the initial weights and the order of the minibatches.
    """

    def __init__(
        self,
        obs_shape: ObsShape,
        make_components: Callable[[], Mapping[str, Component[Any]]],
        *,
        settings: Mapping[str, Any],
        discount: float = 0.99,
        obs_clip: float = 5.0,
        batch_size: int = 256,
        epochs: int = 4,
        device: torch.device | str = "cpu",
        seed: int = 0,
    ) -> None:
        obs_clip = checked("obs_clip", obs_clip, Positive)
        with torch_seeded(derive_seed(seed, "reward", "model")):
            modules = make_components()
        self._obs_norm = ObsNorm(obs_shape, clip=obs_clip, device=device)
        self._reward_normalizer = RewardNormalizer(discount=discount, clip=None)
        super().__init__(
            {
                **modules,
                "obs_norm": Component(self._obs_norm),
                "reward_normalizer": Component(self._reward_normalizer),
            },
            batch_size=batch_size,
            epochs=epochs,
            device=device,
            seed=derive_seed(seed, "reward", "minibatches"),
        )
        self._settings = {**settings, "obs_clip": obs_clip}

    @property
    def settings(self) -> dict[str, Any]:
        """What the run's config records."""
        return {**super().settings, **self._settings}

    @torch.no_grad()
    def reward(self, rows: Batch) -> torch.Tensor:
        """Return the rewards of collected rows, and add the rows to the running statistics.

        Args:
            rows: ``[T, …]`` or ``[T, E, …]``, each batch once.

        Returns:
            float32, in the shape of the column ``done``, on the CPU.
        """
        self._obs_norm.update(self._flat(rows, ("next_obs",))["next_obs"])
        reward = super().reward(rows)
        columns = (reward, rows["done"], rows["episode_id"])
        self._reward_normalizer.update(*(column.reshape(len(reward), -1) for column in columns))
        return self._reward_normalizer.normalize(reward)

    def _normalized(self, obs: Value) -> Value:
        normalized: Value = self._obs_norm(obs)
        return normalized


def settings_of(policy: HasModes | LearnMode, *, user: str) -> dict[str, Any]:
    """Return the discount, the device and the seed that a reward takes from a policy.

    Raises:
        ConfigError: if ``policy`` is not a policy, or has no discount.
    """
    mode = as_learn_mode(policy, user=user)
    discount = mode.spec.discount
    if discount is None:
        raise ConfigError(
            f"{user} reads the discount from the policy, which has none; use a policy that learns "
            "from rewards, such as PPOPolicy"
        )
    seed = mode.spec.seed
    return {
        "discount": discount,
        "device": mode.spec.device,
        "seed": torch.initial_seed() if seed is None else seed,
    }


def shape_in_rows(env: HasSpaces, policy: HasModes | LearnMode, *, user: str) -> ObsShape:
    """Return the shape of observations in the rows of a policy, which keep what it reads.

    Raises:
        SpaceError: if the observations are not supported, or the policy's ``obs_groups`` do not
            fit them.
    """
    space = spaces_of(env)[0]
    parts = ObsParts.of(as_learn_mode(policy, user=user).spec.settings, space, user=user)
    if parts is not None:
        space = parts.in_space(space, acts_only=False, user=user)
    return obs_shape_of(space)
