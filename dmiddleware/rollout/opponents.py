"""Past versions of a policy, against which it plays."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from dmiddleware.errors import CheckpointMismatch, ConfigError
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
    the last versions; a new one replaces the oldest.

    Args:
        make_policy: makes a policy that can collect, into which a version's parameters are loaded.
        size: how many versions are kept.
        policy_kwargs: passed to the opponents' forward, such as ``{"eps": 0.05}``.

    Raises:
        ConfigError: if ``size`` is not positive, or a policy needs more than observations and
            action masks to act.
    """

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
        self._versions: list[CollectMode] = []
        self._n_added = 0

    def __len__(self) -> int:
        return len(self._versions)

    def add(self, policy: HasModes | CollectMode) -> None:
        """Add the present version of a policy; if the pool is full, the oldest is dropped."""
        mode = as_collect_mode(policy, user=_USER)
        self._place(self._n_added % self._size).load_state_dict(mode.state_dict())
        self._n_added += 1

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
        return int(rng.integers(len(self._versions)))

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
        mode = self._versions[number]
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
        """Return the versions, and how many were added."""
        return {
            "n_added": self._n_added,
            "versions": [version.state_dict() for version in self._versions],
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
        for place, version in enumerate(state["versions"]):
            self._place(place).load_state_dict(version)
        self._n_added = int(state["n_added"])

    def _place(self, place: int) -> CollectMode:
        if place == len(self._versions):
            mode = as_collect_mode(self._make_policy(), user=_USER)
            check_sees_games([mode], user=_USER)
            self._versions.append(mode)
        return self._versions[place]


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
