"""Past versions of a policy, against which it plays, and how it fares against them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Literal, Protocol

import numpy as np
import numpy.typing as npt

from dmiddleware.env import OpponentEnv
from dmiddleware.errors import CheckpointMismatch, ConfigError
from dmiddleware.policy import CollectMode, EvalMode, HasModes, as_collect_mode
from dmiddleware.rollout.ratings import elo_change, pfsp
from dmiddleware.settings import Count, checked, takes_options
from dmiddleware.tree import Value, from_numpy, index_rows, map_leaves, to_numpy

__all__ = ["OpponentPool", "check_sees_games"]

_USER: Final = "OpponentPool"
_FIRST_ELO: Final = 1200.0
_FADING: Final = 0.99
"""The weight of all games before, with each game against a version."""
_MIN_GAMES: Final = 7.7
"""Eight games, faded."""


class _HasOpponents(Protocol):
    @property
    def opponents(self) -> frozenset[int]: ...


class OpponentPool:
    """Past versions of a policy, from which opponents are drawn.

    Each opponent is a version that is drawn uniformly for each episode (fictitious self-play:
    Heinrich et al., "Fictitious Self-Play in Extensive-Form Games", 2015). A policy that plays only
    against its present self may forget how to beat older ones, and learn in circles. The pool keeps
    the last versions; a new one replaces the oldest, which plays on in the games in which it was
    drawn until they end.

    With ``prioritized``, versions that are hard to beat are drawn more often: in proportion to the
    square of the share of games that the policy does not win (Vinyals et al., "Grandmaster level in
    StarCraft II using multi-agent reinforcement learning", 2019). The games of a
    :class:`~dmiddleware.rollout.Game` are counted (:meth:`record`); older ones count less.

    In such games, versions may have memories, and may act for a whole team; opponents in an
    :class:`~dmiddleware.env.OpponentEnv` see observations and action masks alone.

    Attributes:
        elo: the Elo rating of the policy; it starts at 1200.
        n_recorded: the games that were counted.

    Args:
        make_policy: makes a policy that can collect, into which a version's parameters are loaded.
        size: how many versions are kept.
        prioritized: whether versions that are hard to beat are drawn more often.
        policy_kwargs: passed to the opponents' forward, such as ``{"eps": 0.05}``.

    Raises:
        ConfigError: if ``size`` is not positive.
    """

    @takes_options
    def __init__(
        self,
        make_policy: Callable[[], HasModes],
        *,
        size: int = 8,
        prioritized: bool = False,
        policy_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self._make_policy = make_policy
        self._size: int = checked("size", size, Count)
        self._kwargs = dict(policy_kwargs or {})
        self._versions: dict[int, CollectMode] = {}
        """By number: those that can be drawn, and older ones that games still use."""
        self._n_added = 0
        self._games: weakref.WeakSet[_HasOpponents] = weakref.WeakSet()
        self._drawn_elsewhere: set[int] = set()
        self._is_prioritized: bool = checked("prioritized", prioritized, bool)
        self.elo = _FIRST_ELO
        self.n_recorded = 0
        self._elos: dict[int, float] = {}
        # Games won, a draw as a half, and all games, which fade.
        self._won: dict[int, float] = {}
        self._played: dict[int, float] = {}

    def __len__(self) -> int:
        return len(self._numbers())

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the games, which are those of this process."""
        return vars(self) | {"_games": weakref.WeakSet()}

    def add(self, policy: HasModes | CollectMode) -> None:
        """Add the present version of a policy.

        If the pool is full, the oldest can no longer be drawn, and is dropped when no game of an
        :class:`~dmiddleware.env.OpponentEnv` uses it. One that another caller has drawn is kept.

        Raises:
            ConfigError: as :meth:`follow`, if an :class:`~dmiddleware.env.OpponentEnv` was built.
        """
        mode = as_collect_mode(policy, user=_USER)
        if any(isinstance(game, OpponentEnv) for game in self._games):
            check_sees_games([mode], user=_USER)
        self._put(self._n_added, mode.state_dict())
        self._elos[self._n_added] = self.elo
        self._n_added += 1
        drawable = self._numbers()
        in_use = self._drawn_elsewhere.union(drawable, *(game.opponents for game in self._games))
        self._versions = {n: mode for n, mode in self._versions.items() if n in in_use}
        for counts in (self._elos, self._won, self._played):
            for number in counts.keys() - in_use:
                del counts[number]

    def follow(self, game: _HasOpponents) -> None:
        """Keep the versions that a game uses until it ends; an env calls it when it is built.

        Raises:
            ConfigError: for an :class:`~dmiddleware.env.OpponentEnv`, if the versions need more
                than its observations and masks, as those with a memory do.
        """
        if isinstance(game, OpponentEnv):
            check_sees_games(list(self._versions.values())[:1], user=_USER)
        self._games.add(game)

    def draw(self, rng: np.random.Generator) -> int:
        """Draw a version, and return its number; see :class:`~dmiddleware.env.Opponents`.

        Raises:
            ConfigError: if the pool is empty.
        """
        if not self._versions:
            raise ConfigError(
                "the OpponentPool is empty; add a policy before the envs start, for example with "
                "the middleware SelfPlay(policy, pool)"
            )
        numbers = self._numbers()
        if self._is_prioritized:
            rates = np.array([self.win_rate(number) for number in numbers])
            number = int(rng.choice(numbers, p=pfsp(rates, "squared")))
        else:
            number = numbers[int(rng.integers(len(numbers)))]
        if not self._games:
            self._drawn_elsewhere.add(number)  # nobody says when that game ends
        return number

    def act(
        self, number: int, obs: Any, mask: npt.NDArray[Any] | None, rng: np.random.Generator
    ) -> Any:
        """Return the action of a version.

        Args:
            number: the version, as :meth:`draw` has returned it.
            obs: the observation, without a leading axis.
            mask: which actions it may take, ``[A]``; None: all.
            rng: seeds what is random in it.

        Raises:
            ConfigError: if the policy needs more than the observation and the mask, as one with a
                memory does.
        """
        mode = self._version(number)
        check_sees_games([mode], user=_USER)
        rows = from_numpy(map_leaves(lambda leaf: np.asarray(leaf)[None], obs))
        inputs = {}
        if mask is not None and "action_mask" in mode.spec.act_inputs:
            inputs["action_mask"] = from_numpy(mask[None] != 0)
        action = self.act_rows(number, rows, inputs, rng)["action"]
        plain = index_rows(to_numpy(action), 0)
        return plain[()] if getattr(plain, "ndim", None) == 0 else plain

    def act_rows(
        self, number: int, obs: Value, inputs: Mapping[str, Any], rng: np.random.Generator
    ) -> dict[str, Any]:
        """Return what a version returns for observations: ``action`` ``[R, …]``, and maybe more.

        Args:
            number: the version, as :meth:`draw` has returned it.
            obs: the observations, ``[R, …]``.
            inputs: what it sees in addition, ``[R, …]`` by keyword.
            rng: seeds what is random in it.
        """
        mode = self._version(number)
        # A version plays in several envs. Its own random numbers would depend on their order, and
        # its state does not have them.
        mode.seed(int(rng.integers(2**63)))
        return dict(mode.forward(obs, **inputs, **self._kwargs))

    def new_mode(self) -> CollectMode:
        """Make a policy, into which a version can be loaded, and return its collect mode."""
        return as_collect_mode(self._make_policy(), user=_USER)

    def record(self, number: int, result: Literal["wins", "draws", "losses"]) -> None:
        """Count a game of the policy against a version.

        Args:
            number: the version, as :meth:`draw` has returned it.
            result: how it ended for the policy.
        """
        if number not in self._versions:
            return
        won = {"wins": 1.0, "draws": 0.5, "losses": 0.0}[result]
        self._won[number] = self._won.get(number, 0.0) * _FADING + won
        self._played[number] = self._played.get(number, 0.0) * _FADING + 1.0
        change = elo_change(self.elo, self._elos[number], [result])
        self.n_recorded += 1
        self.elo += change
        self._elos[number] -= change

    def win_rate(self, number: int) -> float:
        """Return the policy's share of wins against a version; 0.5 before 8 games."""
        played = self._played.get(number, 0.0)
        return self._won[number] / played if played >= _MIN_GAMES else 0.5

    @property
    def ratings(self) -> dict[int, tuple[float, float]]:
        """The policy's win rate against each version that can be drawn, and the version's Elo."""
        return {n: (self.win_rate(n), self._elos.get(n, self.elo)) for n in self._numbers()}

    def state_dict(self) -> dict[str, Any]:
        """Return the versions, those that only games still use, and how many were added."""
        numbers = self._numbers()
        older = sorted(self._versions.keys() - numbers)
        return {
            "n_added": self._n_added,
            "numbers": numbers + older,
            "versions": [self._versions[number].state_dict() for number in numbers],
            "older": [self._versions[number].state_dict() for number in older],
            "ratings": {
                "elo": self.elo,
                "elos": dict(self._elos),
                "won": dict(self._won),
                "played": dict(self._played),
            },
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned.

        Raises:
            CheckpointMismatch: if it has more versions than this pool keeps.
        """
        if len(state["versions"]) > self._size:
            raise CheckpointMismatch(
                f"the checkpoint has {len(state['versions'])} opponents, but this pool keeps "
                f"{self._size}; build it with the size that it had"
            )
        self._n_added, self._versions = int(state["n_added"]), {}
        self._drawn_elsewhere = set()
        versions = [*state["versions"], *state.get("older", ())]
        if "numbers" in state:
            numbers = [int(number) for number in state["numbers"]]
        else:  # of a pool whose versions had the numbers of their places
            last = range(self._n_added - len(versions), self._n_added)
            numbers = sorted(last, key=lambda number: number % self._size)
        for number, version in zip(numbers, versions, strict=True):
            self._put(number, version)
        ratings = state.get("ratings", {})  # older states lack them
        self.elo = float(ratings.get("elo", _FIRST_ELO))
        self._elos = dict.fromkeys(numbers, self.elo) | _by_number(ratings.get("elos", {}))
        self._won = _by_number(ratings.get("won", {}))
        self._played = _by_number(ratings.get("played", {}))

    def _numbers(self) -> list[int]:
        """Return the versions that can be drawn, in the order of their places."""
        first = self._n_added - self._size
        return sorted((n for n in self._versions if n >= first), key=lambda n: n % self._size)

    def _put(self, number: int, state: dict[str, Any]) -> None:
        mode = self.new_mode()
        mode.load_state_dict(state)
        self._versions[number] = mode

    def _version(self, number: int) -> CollectMode:
        if number not in self._versions:  # a place, in games of an older snapshot
            number = self._numbers()[number % self._size]
        return self._versions[number]


def _by_number(values: Mapping[Any, float]) -> dict[int, float]:
    return {int(number): float(value) for number, value in values.items()}


def check_sees_games(modes: Sequence[CollectMode | EvalMode], *, user: str) -> None:
    """Reject policies that need more than a game's observations, which include action masks.

    Args:
        modes: the players' modes.
        user: the caller's name, for the message.

    Raises:
        ConfigError: for a recurrent policy, and for inputs other than ``action_mask``.
    """
    for player, mode in enumerate(modes):
        needed = [name for name in mode.spec.act_inputs if name != "action_mask"]
        if mode.spec.initial_state(1) is not None:
            needed.append("a recurrent state")
        if needed:
            raise ConfigError(
                f"the policy of player {player} needs {', '.join(needed)} to act, but {user} gives "
                "policies the observations of a game and their action masks only; use a policy "
                "without memory, or put what it needs into the observations"
            )
