"""Past versions of a policy, against which it plays."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from dmiddleware.env import OpponentEnv
from dmiddleware.errors import CheckpointMismatch, ConfigError
from dmiddleware.foreign_names import checks_options
from dmiddleware.policy import CollectMode, EvalMode, HasModes, as_collect_mode
from dmiddleware.settings import Count, checked
from dmiddleware.tree import from_numpy, index_rows, map_leaves, to_numpy

__all__ = ["OpponentPool", "check_sees_games"]

_USER: Final = "OpponentPool"


class OpponentPool:
    """Past versions of a policy, from which opponents are drawn.

    Each opponent is a version that is drawn uniformly for each episode (fictitious self-play:
    Heinrich et al., "Fictitious Self-Play in Extensive-Form Games", 2015). A policy that plays only
    against its present self may forget how to beat older ones, and learn in circles. The pool keeps
    the last versions; a new one replaces the oldest, which plays on in the games in which it was
    drawn until they end.

    Args:
        make_policy: makes a policy that can collect, into which a version's parameters are loaded.
        size: how many versions are kept.
        policy_kwargs: passed to the opponents' forward, such as ``{"eps": 0.05}``.

    Raises:
        ConfigError: if ``size`` is not positive, or a policy needs more than observations and
            action masks to act.
    """

    @checks_options
    def __init__(
        self,
        make_policy: Callable[[], HasModes],
        *,
        size: int = 8,
        policy_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self._make_policy = make_policy
        self._size: int = checked("size", size, Count)
        self._kwargs = dict(policy_kwargs or {})
        self._versions: dict[int, CollectMode] = {}
        """By number: those that can be drawn, and older ones that games still use."""
        self._n_added = 0
        self._games: weakref.WeakSet[OpponentEnv] = weakref.WeakSet()
        self._drawn_elsewhere: set[int] = set()

    def __len__(self) -> int:
        return len(self._numbers())

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the games, which are those of this process."""
        return vars(self) | {"_games": weakref.WeakSet()}

    def add(self, policy: HasModes | CollectMode) -> None:
        """Add the present version of a policy.

        If the pool is full, the oldest can no longer be drawn, and is dropped when no game of an
        :class:`~dmiddleware.env.OpponentEnv` uses it. One that another caller has drawn is kept.
        """
        mode = as_collect_mode(policy, user=_USER)
        self._put(self._n_added, mode.state_dict())
        self._n_added += 1
        drawable = self._numbers()
        in_use = self._drawn_elsewhere.union(drawable, *(game.opponents for game in self._games))
        self._versions = {n: mode for n, mode in self._versions.items() if n in in_use}

    def follow(self, game: OpponentEnv) -> None:
        """Keep the versions that a game uses until it ends; an env calls it when it is built."""
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
        """
        mode = self._version(number)
        # A version plays in several envs. Its own random numbers would depend on their order, and
        # its state does not have them.
        mode.seed(int(rng.integers(2**63)))
        inputs = {}
        if mask is not None and "action_mask" in mode.spec.act_inputs:
            inputs["action_mask"] = from_numpy(mask[None] != 0)
        rows = map_leaves(lambda leaf: np.asarray(leaf)[None], obs)
        action = mode.forward(from_numpy(rows), **inputs, **self._kwargs)["action"]
        plain = index_rows(to_numpy(action), 0)
        return plain[()] if getattr(plain, "ndim", None) == 0 else plain

    def state_dict(self) -> dict[str, Any]:
        """Return the versions, those that only games still use, and how many were added."""
        numbers = self._numbers()
        older = sorted(self._versions.keys() - numbers)
        return {
            "n_added": self._n_added,
            "numbers": numbers + older,
            "versions": [self._versions[number].state_dict() for number in numbers],
            "older": [self._versions[number].state_dict() for number in older],
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

    def _numbers(self) -> list[int]:
        """Return the versions that can be drawn, in the order of their places."""
        first = self._n_added - self._size
        return sorted((n for n in self._versions if n >= first), key=lambda n: n % self._size)

    def _put(self, number: int, state: dict[str, Any]) -> None:
        mode = as_collect_mode(self._make_policy(), user=_USER)
        check_sees_games([mode], user=_USER)
        mode.load_state_dict(state)
        self._versions[number] = mode

    def _version(self, number: int) -> CollectMode:
        if number not in self._versions:  # a place, in games of an older snapshot
            number = self._numbers()[number % self._size]
        return self._versions[number]


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
