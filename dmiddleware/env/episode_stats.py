"""The return and the length of the episodes that are under way."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["EpisodeTotals"]


class EpisodeTotals:
    """Sums up rewards and counts steps, per env, from the beginning of its episode.

    Rewards are summed in float64, so that long episodes of small rewards stay exact.

    Args:
        env_num: the number of envs.
    """

    def __init__(self, env_num: int) -> None:
        self._returns = np.zeros(env_num, dtype=np.float64)
        # Lengths come from one count of steps for all envs, and where in it each episode began.
        self._n_steps = 0
        self._begun = [0] * env_num

    def add(self, ids: Sequence[int] | None, reward: npt.NDArray[np.float64]) -> None:
        """Count one step of some envs (None: of all), which gave these rewards."""
        self._n_steps += 1
        if ids is None:
            self._returns += reward
            return
        self._returns[ids] += reward
        for env_id in set(range(len(self._begun))).difference(ids):
            self._begun[env_id] += 1

    def length_of(self, env_id: int) -> int:
        """How many steps an env's episode has had."""
        return self._n_steps - self._begun[env_id]

    def end(self, env_id: int) -> dict[str, np.float32 | int]:
        """Return the totals of an env's episode, as its last info has them, and clear them."""
        totals: dict[str, np.float32 | int] = {
            "eval_episode_return": np.float32(self._returns[env_id]),
            "eval_episode_length": self._n_steps - self._begun[env_id],
        }
        self._returns[env_id] = 0.0
        self._begun[env_id] = self._n_steps
        return totals

    def clear(self, ids: Iterable[int]) -> None:
        """Let new episodes begin in some envs."""
        for env_id in ids:
            self._returns[env_id] = 0.0
            self._begun[env_id] = self._n_steps

    def state_dict(self) -> dict[str, Any]:
        """Return the sums and counts."""
        return {
            "returns": self._returns.copy(),
            "n_steps": self._n_steps,
            "begun": list(self._begun),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Count on from a state."""
        self._returns = np.array(state["returns"], dtype=np.float64)
        self._n_steps = int(state["n_steps"])
        self._begun = list(state["begun"])
