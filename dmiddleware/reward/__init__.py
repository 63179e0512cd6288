"""Rewards that are learned from the rows that a policy collects."""

from dmiddleware.reward.base import RewardModel
from dmiddleware.reward.critic import IntrinsicCritic
from dmiddleware.reward.gail import GAIL, Discriminator
from dmiddleware.reward.icm import ICM
from dmiddleware.reward.rnd import RND

__all__ = ["RewardModel", "GAIL", "Discriminator", "RND", "ICM", "IntrinsicCritic"]
