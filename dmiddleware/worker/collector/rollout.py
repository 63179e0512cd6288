"""Collecting in columns: the core under every collector."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from dmiddleware.data import tree
from dmiddleware.data.tree import Batch
from dmiddleware.env import BaseEnvManager
from dmiddleware.policy import CollectMode
from dmiddleware.worker.collector.rows import Piece, RowStore
from dmiddleware.worker.collector.stepper import Ids, Step, Stepper

__all__ = ["RolloutCollector"]

_NO_KWARGS: Mapping[str, Any] = {}


class RolloutCollector:
    """Collects transitions of all envs of a manager, as batches of columns.

    The columns are ``obs``, ``action``, ``reward``, ``next_obs`` (the true successor), ``done``,
    ``terminated``, ``truncated``, ``episode_id``, ``collect_iter`` and whatever else the policy's
    forward returns. Rows that one env made in one episode have one ``episode_id`` and stand below
    each other in the env's lane, from one batch to the next too.

    Nothing is thrown away between calls: an episode that a call cuts goes on in the next one, and
    rows that do not fit into a rectangle (when envs do not step in lockstep) wait for it. Only when
    an env fails, the rows of its unfinished trajectory that were not handed out yet are dropped,
    and counted.

    Args:
        collect_mode: the policy's collect mode; a policy written per env works too, row by row.
        env_manager: its envs; it is launched if it is not yet, and stays its owner's to close.
        source_id: tells the collectors of one run apart in ``episode_id``.
    """

    def __init__(
        self,
        collect_mode: CollectMode,
        env_manager: BaseEnvManager,
        *,
        source_id: int = 0,
    ) -> None:
        self._stepper = Stepper(collect_mode, env_manager, source_id=source_id)
        self._store = RowStore(env_manager.env_num)
        self._dropped = 0
        self._per_env_style = not collect_mode.get_attribute("batched")

    @property
    def env_num(self) -> int:
        """Number of envs, ``E``."""
        return self._stepper.env_num

    @property
    def env_step(self) -> int:
        """Transitions made so far, over all envs."""
        return self._stepper.env_step

    @property
    def env_episode(self) -> int:
        """Episodes finished so far, over all envs."""
        return self._stepper.env_episode

    @property
    def episode_returns(self) -> list[float]:
        """Undiscounted returns of the episodes that ended during the last call."""
        return self._stepper.episode_returns

    @property
    def dropped_steps(self) -> int:
        """Transitions made and not handed out, because their env failed within the episode."""
        return self._dropped

    def collect(
        self,
        n_sample: int,
        *,
        train_iter: int = 0,
        policy_kwargs: Mapping[str, Any] | None = None,
        random: bool = False,
    ) -> Batch:
        """Collect transitions: the same number from every env.

        Args:
            n_sample: how many at least; rounded up to a multiple of the number of envs.
            train_iter: the policy's iteration, stamped on the rows as ``collect_iter``.
            policy_kwargs: given to the policy's forward, for example ``{"eps": 0.1}``.
            random: act at random (with the env manager's seed); the policy is asked all the same,
                for its other columns.

        Returns:
            A batch ``[T, E, …]`` with ``T = ceil(n_sample / E)``; its memory is the caller's.

        Raises:
            ValueError: if ``n_sample`` is not positive.
            SpaceError: at the first call, if the envs do not fit the policy's model.
            EnvCrashed: if an env keeps failing.
        """
        if n_sample <= 0:
            raise ValueError(f"n_sample must be positive, got {n_sample}")
        n_steps = -(-n_sample // self.env_num)
        self._stepper.episode_returns = []
        stamps = np.full(self.env_num, train_iter, np.int64)
        while self._store.fewest < n_steps:
            self._step(policy_kwargs or _NO_KWARGS, stamps, random)
        return self._store.take_rectangle(n_steps)

    def _step(self, policy_kwargs: Mapping[str, Any], stamps: Ids, random: bool) -> None:
        step = self._stepper.step(policy_kwargs, random=random)
        piece = self._piece(step, stamps)
        if step.timestep.is_full:
            self._store.add(piece)
            return
        env_id = step.timestep.env_id
        if step.kept is not None:
            piece = {name: _rows(column, step.kept) for name, column in piece.items()}
            env_id = env_id[step.kept]
        self._store.add_some(piece, env_id)
        if step.lost:
            self._dropped += self._store.drop(step.lost)

    def _piece(self, step: Step, stamps: Ids) -> Piece:
        timestep = step.timestep
        next_obs = timestep.next_obs
        if next_obs is timestep.obs:
            # The next batch begins with these very arrays; each batch owns its memory.
            next_obs = tree.map_nested(np.copy, next_obs)
        return {
            "obs": step.obs,
            "reward": timestep.reward,
            "next_obs": next_obs,
            "done": timestep.done,
            "terminated": timestep.terminated,
            "truncated": timestep.truncated,
            "episode_id": step.episode_id,
            "collect_iter": stamps[: len(timestep)],
            **step.output,
        }


def _rows(column: Any, rows: Ids) -> Any:
    return tree.map_nested(lambda leaf: leaf[rows], column)
