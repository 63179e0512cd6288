"""Rewards that are learned from the rows that a policy collects."""

from dmiddleware.reward.base import RewardModel
from dmiddleware.reward.gail import GAIL, Discriminator

__all__ = ["RewardModel", "GAIL", "Discriminator"]
