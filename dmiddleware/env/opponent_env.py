"""A game of several players from the seat of one of them."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import gymnasium as gym
import numpy as np
import numpy.typing as npt

from dmiddleware.env.env_access import InnerAttributes
from dmiddleware.env.games import BattleEnv
from dmiddleware.errors import ConfigError

__all__ = ["OpponentEnv", "Opponents"]


@runtime_checkable
class Opponents(Protocol):
    """The players who may be opponents, by number.

    :class:`~dmiddleware.rollout.OpponentPool` has past versions of a policy. A snapshot of an env
    has the numbers of the opponents in its episode, and its random generator, but nothing else that
    an opponent keeps from one action to the next.

    Opponents that change during a run, as the pool's do, also have a method ``follow(game)``. It
    gets each :class:`OpponentEnv` that is built with them, whose property ``opponents`` has the
    numbers that must stay the same until its game ends.
    """

    def draw(self, rng: np.random.Generator) -> int:
        """Choose an opponent for an episode, with the random generator of the env."""
        ...

    def act(
        self, number: int, obs: Any, mask: npt.NDArray[Any] | None, rng: np.random.Generator
    ) -> Any:
        """Return the action of an opponent.

        Args:
            number: the opponent, as :meth:`draw` has returned it.
            obs: its observation.
            mask: which actions it may take, ``[A]``; None: all.
            rng: the random generator of the env, for actions that are drawn.
        """
        ...


@runtime_checkable
class _FollowsGames(Opponents, Protocol):
    """Opponents who keep what games in progress use."""

    def follow(self, game: OpponentEnv) -> None:
        """Take note of an env, without keeping it alive."""
        ...


class OpponentEnv(InnerAttributes, gym.Env[Any, Any]):
    """A game as a Gymnasium env: one player acts, and opponents are part of the env.

    A step plays the player's move and those of the opponents until the player's next turn, or the
    end of the game; its reward is the sum of the player's rewards in between. An action mask that
    is not in the observation is in the info, as ``action_mask``.

    Args:
        game: a game whose players have the same spaces, such as a :class:`PettingZooAdapter`.
        opponents: one of them is drawn for each other seat in each episode, for example from an
            :class:`~dmiddleware.rollout.OpponentPool`; None: the others take random actions that
            are allowed.
        seat: the player that acts; None: another one, at random, in each episode.

    Raises:
        ConfigError: if the game does not have spaces, or not this seat, or ``opponents`` lacks a
            method.
    """

    def __init__(
        self, game: BattleEnv, opponents: Opponents | None = None, *, seat: int | None = None
    ) -> None:
        if not callable(getattr(game, "to_move", None)):
            raise ConfigError(
                f"OpponentEnv takes a game, got {game!r:.100}; wrap a PettingZoo env in "
                "PettingZooAdapter, or derive the game's class from BattleEnv"
            )
        if game.observation_space is None or game.action_space is None:
            raise ConfigError(
                f"OpponentEnv needs a game whose players have the same spaces, but {game!r:.100} "
                "has no observation_space or action_space"
            )
        if seat is not None and not 0 <= seat < game.n_player:
            raise ConfigError(f"seat must be 0 to {game.n_player - 1}, or None, got {seat}")
        if opponents is not None and not isinstance(opponents, Opponents):
            raise ConfigError(
                "opponents must have the methods draw and act, as an OpponentPool has, got "
                f"{opponents!r:.100}"
            )
        self._game = game
        # The methods alone, because the state of an env has what its attributes hold.
        self._draw = None if opponents is None else opponents.draw
        self._act = None if opponents is None else opponents.act
        self._drawn: dict[int, int] = {}
        self._given_seat = seat
        self.observation_space, self.action_space = game.observation_space, game.action_space
        if isinstance(opponents, _FollowsGames):
            opponents.follow(self)

    @property
    def opponents(self) -> frozenset[int]:
        """The numbers of the opponents in the present game."""
        return frozenset(self._drawn.values())

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Start a game, and play it to the player's first turn.

        Args:
            seed: of the game, the seats and the opponents.
            options: passed to the game; a game that is reset with options takes them as a keyword.
        """
        super().reset(seed=seed)
        rng, n_player = self.np_random, self._game.n_player
        keywords: Any = {} if options is None else {"options": options}
        over = True
        while over:
            # A game that ends before the player's first turn has no step; play another one.
            self._obs = list(self._game.reset(seed=int(rng.integers(2**31)), **keywords))
            self._infos: list[dict[str, Any]] = [{} for _ in range(n_player)]
            fixed = self._given_seat
            self._seat = int(rng.integers(n_player)) if fixed is None else fixed
            if self._draw is not None:
                others = (player for player in range(n_player) if player != self._seat)
                self._drawn = {player: self._draw(rng) for player in others}
            over = any(self._wait()[1:])
        return self._obs[self._seat], self._info()

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Play the player's move, and then the opponents'."""
        reward, terminated, truncated = self._play(action)
        if not (terminated or truncated):
            more, terminated, truncated = self._wait()
            reward += more
        return self._obs[self._seat], reward, terminated, truncated, self._info()

    def close(self) -> None:
        """Close the game."""
        self._drawn = {}
        self._game.close()

    def _inner_env(self) -> Any:
        return self._game

    def _wait(self) -> tuple[float, bool, bool]:
        """Play until it is the player's turn, or the game is over."""
        total, terminated, truncated = 0.0, False, False
        while not (terminated or truncated) and self._seat not in self._game.to_move():
            reward, terminated, truncated = self._play(None)
            total += reward
        return total, terminated, truncated

    def _play(self, action: Any) -> tuple[float, bool, bool]:
        game = self._game
        actions: list[Any] = [None] * game.n_player
        for player in game.to_move():
            if player == self._seat:
                actions[player] = action
            else:
                obs, mask = self._obs[player], game.action_mask(player)
                actions[player] = (
                    self._act_randomly(obs, mask)
                    if self._act is None
                    else self._act(self._drawn[player], obs, mask, self.np_random)
                )
        self._obs, rewards, terminated, truncated, self._infos = game.step(actions)
        return float(rewards[self._seat]), terminated, truncated

    def _info(self) -> dict[str, Any]:
        info = dict(self._infos[self._seat])
        mask = self._game.action_mask(self._seat)
        return info if mask is None else {**info, "action_mask": np.asarray(mask)}

    def _act_randomly(self, obs: Any, mask: npt.NDArray[Any] | None) -> Any:
        rng = self.np_random
        if mask is not None:
            return rng.choice(np.flatnonzero(mask))
        self.action_space.seed(int(rng.integers(2**31)))
        return self.action_space.sample()
