"""Reference scores of the environments of the zoo, for means over several of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

__all__ = ["REFERENCE_SCORES"]

REFERENCE_SCORES: Final[Mapping[str, tuple[float, float]]] = {
    "ALE/Pong-v5": (-20.6, 20.0),
    "Acrobot-v1": (-498.0, -100.0),
    "CartPole-v1": (22.1, 475.0),
    "HalfCheetah-v5": (-258.0, 4800.0),
    "Hopper-v5": (17.6, 3800.0),
    "LunarLander-v3": (-184.0, 200.0),
    "Pendulum-v1": (-1241.0, -150.0),
    "Pong-v5": (-20.6, 20.0),
    "dmiddleware.zoo.envs:CartPolePositions-v1": (22.1, 475.0),
    "dmiddleware.zoo.envs:Recall-v0": (0.25, 1.0),
    "dmiddleware.zoo.envs:TwoStepGame": (4.75, 8.0),
    "mpe2.simple_spread_v3:parallel_env": (-28.4, -15.0),
}
"""By the id of an environment: the mean return of uniformly random actions, and of a good policy.

The first is measured over 30 episodes or more, or computed for the two smallest ones. The second is
the return at which Gymnasium counts the environment as solved. Where Gymnasium names none, it is
what the zoo's best policies reach, or the best possible return.
"""
