"""The interface of a game of several players."""

from __future__ import annotations

from typing import Any, Protocol

import gymnasium as gym
import numpy.typing as npt

__all__ = ["BattleEnv"]


class BattleEnv(Protocol):
    """A game of two or more players, numbered from 0.

    A class that derives from this one gets the defaults: all players move at the same time, and all
    actions are allowed.
    """

    observation_space: gym.Space[Any] | None = None
    """What one player observes; None: unknown, so policies are not checked against it."""
    action_space: gym.Space[Any] | None = None
    """What one player does."""
    n_player: int = 2

    def reset(self, seed: int | None = None) -> list[Any]:
        """Start a new game; return one observation per player."""
        ...

    def step(
        self, actions: list[Any]
    ) -> tuple[list[Any], list[float], bool, bool, list[dict[str, Any]]]:
        """Play one move.

        Args:
            actions: one per player, None for those that are not to move.

        Returns:
            Observations, rewards, ``terminated``, ``truncated``, infos; the lists have one item per
            player.
        """
        ...

    def to_move(self) -> tuple[int, ...]:
        """Return the players whose actions the next step takes."""
        return tuple(range(self.n_player))

    def action_mask(self, player: int) -> npt.NDArray[Any] | None:
        """Return which actions a player may take, ``[A]``; None: all."""
        return None

    def close(self) -> None:
        """Release the game's resources."""
        return
