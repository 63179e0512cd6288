"""The base class of networks, which know the spaces they were built for."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
from torch import nn

from dmiddleware.errors import SpaceError
from dmiddleware.model.spaces import (
    ActionKind,
    ActionShape,
    ObsShape,
    action_kind_of,
    action_parts,
    action_shape_of,
    as_obs_shape,
    fits_shape,
    obs_shape_of,
)

__all__ = ["Network"]


class Network(nn.Module):
    """A torch module that maps observations to what a policy needs.

    Args:
        obs_shape: see :mod:`dmiddleware.model.spaces`.
        action_shape: see :mod:`dmiddleware.model.spaces`; the number of actions if these are
            discrete.
        action_space: the kind of actions.
        critic_obs_shape: the shape of what a critic sees, if it is not what the actor sees; None:
            ``obs_shape``. Observations are then mappings with the names of both.

    Attributes:
        obs_shape: the shape, in the form of :func:`~dmiddleware.model.spaces.as_obs_shape`.
        critic_obs_shape: likewise.
        action_shape: as given.
        action_space: as given.
        action_parts: the leaves of both, in the order of the outputs.

    Raises:
        SpaceError: if a shape is invalid.
        ValueError: if another option of a subclass is.
    """

    def __init__(
        self,
        obs_shape: ObsShape,
        action_shape: ActionShape,
        *,
        action_space: ActionKind = "discrete",
        critic_obs_shape: ObsShape | None = None,
    ) -> None:
        super().__init__()
        self.action_parts = action_parts(action_space, action_shape)
        self.obs_shape = as_obs_shape(obs_shape)
        critic = obs_shape if critic_obs_shape is None else critic_obs_shape
        self.critic_obs_shape = as_obs_shape(critic)
        self.action_shape = action_shape
        self.action_space = action_space

    def check_spaces(self, observation_space: gym.Space[Any], action_space: gym.Space[Any]) -> None:
        """Reject an environment whose spaces this network was not built for.

        Args:
            observation_space: that of one environment.
            action_space: that of one environment.

        Raises:
            SpaceError: naming what the environment has and what the network was built for.
        """
        name = type(self).__name__
        obs_shape = as_obs_shape(obs_shape_of(observation_space))
        if not fits_shape(self.obs_shape, obs_shape):
            raise SpaceError(
                f"{name} was built for observations of shape {self.obs_shape}, but the environment "
                f"gives {observation_space}; build the policy with for_env(env), or set the "
                f"model's obs_shape to {obs_shape!r}"
            )
        kind, shape = action_kind_of(action_space), action_shape_of(action_space)
        if action_parts(kind, shape) != self.action_parts:
            others = "" if kind == self.action_space else ", or use PPO, which supports them all"
            raise SpaceError(
                f"{name} was built for {self.action_space} actions of size {self.action_shape}, "
                f"but the environment takes {action_space}; build the policy with for_env(env), or "
                f"set the model's action_space to {kind!r} and its action_shape to {shape}{others}"
            )
