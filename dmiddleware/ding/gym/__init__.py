"""The face of the old ``gym``: Gymnasium's envs with gym's five old rules.

``reset`` returns the observation alone, ``step`` four values, ``env.seed`` seeds the next reset, a
time limit is ``info["TimeLimit.truncated"]``, and old ids are mapped to today's.
"""

from gymnasium import error, logger, spaces, utils
from gymnasium.spaces import Space

from dmiddleware.ding.gym import envs, wrappers
from dmiddleware.ding.gym.core import (
    ActionWrapper,
    Env,
    ObservationWrapper,
    OldEnv,
    RewardWrapper,
    Wrapper,
)
from dmiddleware.ding.gym.envs.registration import make, register, spec

__all__ = [
    "ActionWrapper",
    "Env",
    "ObservationWrapper",
    "OldEnv",
    "RewardWrapper",
    "Space",
    "Wrapper",
    "envs",
    "error",
    "logger",
    "make",
    "register",
    "spaces",
    "spec",
    "utils",
    "wrappers",
]

__version__ = "0.25.1"
