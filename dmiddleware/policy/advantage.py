"""Policies that learn from advantages."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import Any

import torch

from dmiddleware.policy.actor_critic import ActorCriticPolicy, ActorCriticSettings
from dmiddleware.policy.agents import present_agents
from dmiddleware.policy.component import Component
from dmiddleware.policy.modes import PolicySpec
from dmiddleware.policy.obs_norm import ObsNormSettings
from dmiddleware.rl import RewardNormalizer, RunningMeanStd
from dmiddleware.settings import Fraction, Positive
from dmiddleware.tree import Batch, Columns, Nested

__all__ = ["AdvantagePolicy", "AdvantageSettings"]


class AdvantageSettings(ObsNormSettings, ActorCriticSettings):
    """Settings of policies that learn from advantages."""

    norm_clip: Positive | None = 10.0
    """Largest absolute value of normalized observations and rewards; None does not clip."""
    gae_lambda: Fraction = 0.95
    """λ of generalized advantage estimation."""
    reward_norm: bool = False
    """Whether to divide rewards by the running standard deviation of returns."""
    value_norm: bool = False
    """Whether the critic learns returns normalized by running statistics."""
    adv_norm: bool = True
    """Whether to normalize advantages in each minibatch."""


class AdvantagePolicy(ActorCriticPolicy):
    """An actor-critic that learns from the columns ``adv`` and ``ret``.

    They come from ``GAEEstimator``, which computes the values of successors with
    :meth:`value_fn`.

    - ``obs_norm``: observations are normalized in every forward. The statistics do not change
      between collecting a batch and learning from it.
    - ``reward_norm``: rewards are divided by the running standard deviation of the discounted
      return. ``GAEEstimator`` asks for it in the learner's process (:meth:`scale_rewards`), so all
      collectors share the statistics and the learner's checkpoint holds them.
    - ``value_norm``: the critic predicts returns normalized by their running mean and standard
      deviation (van Hasselt et al., "Learning Values Across Many Orders of Magnitude", 2016,
      without the correction of the last layer; Yu et al., "The Surprising Effectiveness of PPO in
      Cooperative Multi-Agent Games", 2022, section 5.1). The column ``value`` and ``value_fn`` are
      in units of the return. The statistics take the returns of each collected batch once, before
      it is learned from (:meth:`observe_returns`).
    - ``adv_norm``: advantages have mean 0 and standard deviation 1 in each minibatch.

    With several ranks, all of these are the statistics of what all ranks see.
    """

    cfg: AdvantageSettings

    def setup(self) -> None:
        """Build the statistics of rewards and returns."""
        self.reward_normalizer: RewardNormalizer | None = None
        if self.cfg.reward_norm:
            self.reward_normalizer = RewardNormalizer(
                discount=self.cfg.discount,
                clip=self.cfg.norm_clip,
                return_stats=self.make_statistics(),
            )
        self.return_stats: RunningMeanStd | None = None
        if self.cfg.value_norm:
            self.return_stats = self.make_statistics(device=self.device, in_place=True)

    @cached_property
    def spec(self) -> PolicySpec:
        """What others read of the policy."""
        return replace(
            super().spec,
            gae_lambda=self.cfg.gae_lambda,
            scale_rewards=self.scale_rewards,
            observe_returns=self.observe_returns,
        )

    def scale_rewards(self, batch: Batch) -> torch.Tensor:
        """Update ``reward_norm`` with the rewards of a collected batch, and return them scaled.

        Called once per collected batch, in the learner's process, before advantages are estimated;
        without ``reward_norm`` the rewards are returned unchanged.

        Args:
            batch: ``[T, E, …]``, or one lane ``[T, …]``, with the columns ``reward``, ``done`` and
                ``episode_id``.

        Returns:
            The rewards, float32, in the shape of ``reward``.
        """
        reward = batch["reward"]
        if self.reward_normalizer is None:
            return reward
        lanes = (len(reward), -1)
        # The returns of unfinished episodes are kept by id, on the host.
        columns = (column.cpu() for column in (reward, batch["done"], batch["episode_id"]))
        self.reward_normalizer.update(*(column.reshape(lanes) for column in columns))
        self.share_statistics()
        return self.reward_normalizer.normalize(reward)

    def observe_returns(self, ret: torch.Tensor, obs: Nested | None = None) -> None:
        """Add the returns ``[…]`` of a collected batch to the statistics of ``value_norm``."""
        if self.several_agents and obs is not None:
            ret = ret[present_agents(obs)]
        if self.return_stats is not None:
            self.return_stats.update(ret.to(self.device))

    def as_return(self, value: torch.Tensor) -> torch.Tensor:
        """Return the critic's output in units of the return."""
        return value if self.return_stats is None else self.return_stats.denormalize(value)

    def as_output(self, ret: torch.Tensor) -> torch.Tensor:
        """Return returns in units of the critic's output."""
        if self.return_stats is None:
            return ret
        return self.return_stats.normalize(ret, clip=None)

    def make_components(self) -> dict[str, Component[Any]]:
        """Return the networks, and how each is trained."""
        components = super().make_components()
        if self.return_stats is not None:
            components |= {"return_stats": Component(self.return_stats, acts=True)}
        if self.reward_normalizer is not None:
            components |= {"reward_normalizer": Component(self.reward_normalizer)}
        return components

    def learned_advantage(self, batch: Columns, weight: torch.Tensor | None = None) -> torch.Tensor:
        """Return the advantages of a minibatch, normalized if ``adv_norm`` says so.

        Args:
            batch: the minibatch.
            weight: the weight of each row in the losses, of mean 1; None: all weigh the same.
        """
        adv: torch.Tensor = batch["adv"]
        if not self.cfg.adv_norm:
            return adv
        if self.reducer is not None:
            return self._standardized_over_ranks(adv, weight)
        if weight is not None:
            centered = adv - (adv * weight).mean()
            return centered / ((centered.square() * weight).mean().sqrt() + 1e-8)
        return adv if adv.numel() < 2 else (adv - adv.mean()) / (adv.std() + 1e-8)

    def _standardized_over_ranks(
        self, adv: torch.Tensor, weight: torch.Tensor | None
    ) -> torch.Tensor:
        """Return advantages with mean 0 and standard deviation 1 over the rows of all ranks."""
        assert self.reducer is not None
        wide = adv.double()
        counts = torch.ones_like(wide) if weight is None else (weight > 0).double()
        sums = torch.stack([counts.sum(), (wide * counts).sum()])
        self.reducer.add(sums)
        n_rows = sums[0]
        centered = wide - sums[1] / n_rows
        squares = (centered.square() * counts).sum()
        self.reducer.add(squares)
        n_free = n_rows - 1.0 if weight is None else n_rows
        scaled = (centered / ((squares / n_free).sqrt() + 1e-8)).to(adv.dtype)
        return torch.where(n_free > 0, scaled, adv)
