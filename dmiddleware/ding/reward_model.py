"""The face of ``ding.reward_model``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from dmiddleware.classic.reward_models import (
    BaseRewardModel,
    GailRewardModel,
    HerRewardModel,
    ICMRewardModel,
    RndRewardModel,
    create_reward_model,
    get_reward_model_cls,
)

__all__ = [
    "BaseRewardModel",
    "GailRewardModel",
    "HerRewardModel",
    "ICMRewardModel",
    "RndRewardModel",
    "create_reward_model",
    "get_reward_model_cls",
]

_NO_ALGORITHM: Final = "its algorithm is not here; dmiddleware.reward has RND, ICM and GAIL"

REFUSED: Final[Mapping[str, str]] = dict.fromkeys(
    (
        "DrexRewardModel", "EpisodicNGURewardModel", "GuidedCostRewardModel", "PdeilRewardModel",
        "PwilRewardModel", "RedRewardModel", "RndNGURewardModel", "TrexRewardModel",
    ),
    _NO_ALGORITHM,
)  # fmt: skip
