"""Collecting in columns: the core under every collector."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import torch

from dmiddleware.data import as_tree, index_rows, map_nested
from dmiddleware.data.batch import Batch
from dmiddleware.env import BaseEnvManager
from dmiddleware.policy import CollectMode, collate
from dmiddleware.rollout.row_store import Piece, RowStore
from dmiddleware.rollout.stepper import Ids, Stepper, VectorStep

__all__ = ["RolloutCollector"]

_NO_KWARGS: Mapping[str, Any] = {}

_SPARE_ROWS: Final = 64


class RolloutCollector:
    """Collects transitions of all envs of a manager, as batches of columns.

    The columns are ``obs``, ``action``, ``reward`` float32, ``next_obs`` (the true successor),
    ``done``, ``terminated``, ``truncated``, ``episode_id`` int64, ``collect_iter`` int64 and
    whatever else the policy's forward returns. (A policy that makes its transitions itself, in
    ``_process_transition``, decides on the first six.) Rows that one env made in one episode have
    one ``episode_id`` and stand below each other in the env's lane, from one batch to the next too.

    Nothing is thrown away between calls: an episode that a call cuts goes on in the next one, and
    rows that do not fit into a rectangle wait for it. Where envs step in lockstep, and some spend
    steps on their resets, the others would make ever more rows than fit: once an env has many, a
    batch holds some of them in the lane of one that lacks rows, and what follows of their episode
    gets another ``episode_id``. Only when an env fails, or was closed and launched again, the rows
    of its unfinished trajectory that were not handed out yet are dropped, and counted.

    Args:
        collect_mode: the policy's collect mode; a policy written per env works too, row by row.
        env_manager: its envs; it is launched if it is not yet, and stays its owner's to close.
        source_id: tells the collectors of one run apart in ``episode_id``, below 2^31.
    """

    def __init__(
        self, collect_mode: CollectMode, env_manager: BaseEnvManager, *, source_id: int = 0
    ) -> None:
        self._stepper = Stepper(collect_mode, env_manager, source_id=source_id)
        self._store = RowStore(env_manager.env_num)
        self._mode = collect_mode
        self._one_by_one = not collect_mode.get_attribute("batched")
        self._dropped = 0
        self._stamps = np.zeros(env_manager.env_num, np.int64)
        # Envs whose current episode collect_episodes does not want (see there).
        self._skipped: set[int] = set()
        # Ids of episodes whose first rows it dropped, and whose others were wanted again.
        self._headless: set[int] = set()
        self._n_extra = 0

    # State ----------------------------------------------------------------------------------------

    @property
    def env_num(self) -> int:
        """Number of envs, ``E``."""
        return self._stepper.env_num

    @property
    def env_manager(self) -> BaseEnvManager:
        """The env manager."""
        return self._stepper.env_manager

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
    def ends(self) -> torch.Tensor:
        """The rows that end an episode, of the batch that :meth:`collect` returned last.

        int64 indices into the batch flattened to ``[T * E, …]``.
        """
        return self._store.ends

    @property
    def dropped_steps(self) -> int:
        """Transitions made and never handed out."""
        return self._dropped

    @property
    def waiting_steps(self) -> int:
        """Transitions made and not handed out yet."""
        return len(self._store)

    def reset(
        self,
        *,
        collect_mode: CollectMode | None = None,
        env_manager: BaseEnvManager | None = None,
    ) -> None:
        """Begin anew: fresh episodes in all envs, nothing waiting; counters stay.

        Args:
            collect_mode: act with another policy from now on.
            env_manager: act in other envs from now on; launched if it is not yet.
        """
        self._dropped += len(self._store)
        if collect_mode is not None:
            self._mode = collect_mode
            self._one_by_one = not collect_mode.get_attribute("batched")
        self._stepper.reset(mode=collect_mode, env_manager=env_manager)
        self._store = RowStore(self.env_num)
        self._stamps = np.zeros(self.env_num, np.int64)
        self._skipped.clear()
        self._headless.clear()

    # Collecting -----------------------------------------------------------------------------------

    def collect(
        self,
        n_sample: int,
        *,
        train_iter: int = 0,
        policy_kwargs: Mapping[str, Any] | None = None,
        random: bool = False,
    ) -> Batch:
        """Collect transitions: the same number from every env (but see above).

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
        self._begin_call()
        self._skip_no_more()
        stamps = self._stamps_of(train_iter)
        kwargs = policy_kwargs or _NO_KWARGS
        store = self._store
        if n_steps == 1 and store.is_empty:
            # The commonest case, spared what the others need.
            step = self._stepper.step(kwargs, random=random)
            if self._is_plain(step):
                return store.pass_on(self._piece(step, stamps))
            self._keep(step, stamps)
        loans: dict[int, int] = {}
        while not self._is_filled(n_steps, loans):
            # Envs that have their rows wait for those that do not, where the manager lets them.
            lacking = None if store.is_level else np.flatnonzero(store.counts < n_steps)
            if self._step(kwargs, stamps, random, lacking).lost:
                loans.clear()  # what was to be lent may be gone
        return store.take_rectangle(n_steps, loans, self._stepper.split_episode)

    def collect_step(
        self,
        *,
        train_iter: int = 0,
        policy_kwargs: Mapping[str, Any] | None = None,
        random: bool = False,
    ) -> tuple[Batch, Ids]:
        """Collect one transition of every env, or what there is where some spend it on a reset.

        Args:
            train_iter: as in :meth:`collect`.
            policy_kwargs: as in :meth:`collect`.
            random: as in :meth:`collect`.

        Returns:
            A batch ``[R, …]``, and the env of each row, ``[R] int64``.

        Raises:
            SpaceError: at the first call, if the envs do not fit the policy's model.
            EnvCrashed: if an env keeps failing.
        """
        if not self.env_manager.in_lockstep:
            batch = self.collect(
                self.env_num, train_iter=train_iter, policy_kwargs=policy_kwargs, random=random
            )
            return index_rows(batch, 0), np.arange(self.env_num)
        self._begin_call()
        self._skip_no_more()
        while len(self._store) == 0:
            self._step(policy_kwargs or _NO_KWARGS, self._stamps_of(train_iter), random, None)
        rows, env_id = self._store.take_all()
        return as_tree(rows), env_id

    def collect_episodes(
        self,
        n_episode: int,
        *,
        train_iter: int = 0,
        policy_kwargs: Mapping[str, Any] | None = None,
        random: bool = False,
    ) -> list[Batch]:
        """Collect whole episodes: a fixed share from every env, so short ones are not preferred.

        The share is settled before the first step; were it "the first ``n_episode`` that end",
        short episodes would come first. Shares differ by one at most, and what is over goes to
        other envs in the next call. An env that has delivered its share pauses; where the manager
        cannot step some envs without the others, its next episodes are kept for the next call, at
        most as many as its share (those that begin after that are dropped, and counted). Episodes
        that were handed out in part are given up first, and what waited of them is counted as
        dropped.

        Args:
            n_episode: how many.
            train_iter: as in :meth:`collect`.
            policy_kwargs: as in :meth:`collect`.
            random: as in :meth:`collect`.

        Returns:
            Batches ``[T_i, …]``, one per episode, in the order in which they ended.

        Raises:
            ValueError: if ``n_episode`` is not positive.
            SpaceError: at the first call, if the envs do not fit the policy's model.
            EnvCrashed: if an env keeps failing.
        """
        if n_episode <= 0:
            raise ValueError(f"n_episode must be positive, got {n_episode}")
        self._begin_call()
        self._give_up_cut_episodes()
        shares = self._shares(n_episode)
        most = 2 * np.maximum(shares, 1)
        finished = self._store.n_ends
        stamps = self._stamps_of(train_iter)
        while (lacking := np.flatnonzero(finished < shares)).size:
            step = self._step(policy_kwargs or _NO_KWARGS, stamps, random, lacking)
            for env in step.ended:
                finished[env] += env not in self._skipped
            for env in step.begun:
                (self._skipped.add if finished[env] >= most[env] else self._skipped.discard)(env)
        return self._store.take_episodes(shares)

    def _begin_call(self) -> None:
        self._stepper.episode_returns = []
        left = self._stepper.leave_earlier_launch()
        if len(left):
            self._dropped += self._store.drop(left)
            self._skipped.clear()

    def _is_filled(self, n_steps: int, loans: dict[int, int]) -> bool:
        """Tell whether every lane can be filled, and from whom those that lack rows borrow."""
        store = self._store
        if store.fewest >= n_steps:
            return True
        if store.is_level or not self.env_manager.in_lockstep:
            return False
        counts = store.counts
        may_lend = counts >= 2 * n_steps + _SPARE_ROWS
        may_lend[[*loans, *loans.values()]] = False
        lenders = np.flatnonzero(may_lend)
        lacks = counts < n_steps
        lacks[list(loans)] = False
        borrowers = np.flatnonzero(lacks)
        loans.update(zip(borrowers.tolist(), lenders.tolist(), strict=False))
        return len(borrowers) <= len(lenders)

    def _shares(self, n_episode: int) -> Ids:
        share, n_extra = divmod(n_episode, self.env_num)
        order = (np.arange(self.env_num) - self._n_extra) % self.env_num
        self._n_extra = (self._n_extra + n_extra) % self.env_num
        return share + (order < n_extra)

    def _give_up_cut_episodes(self) -> None:
        cut = np.union1d(self._store.cut_episodes, np.array(list(self._headless), np.int64))
        self._headless.clear()
        self._dropped += self._store.drop(cut)
        self._stepper.restart(np.flatnonzero(np.isin(self._stepper.episode_id, cut)))

    def _skip_no_more(self) -> None:
        if self._skipped:
            self._headless.update(self._stepper.episode_id[list(self._skipped)].tolist())
            self._skipped.clear()

    def _stamps_of(self, train_iter: int) -> Ids:
        if self._stamps[0] != train_iter:
            self._stamps = np.full(self.env_num, train_iter, np.int64)
        return self._stamps

    def _step(
        self, policy_kwargs: Mapping[str, Any], stamps: Ids, random: bool, only: Ids | None
    ) -> VectorStep:
        step = self._stepper.step(policy_kwargs, random=random, only=only)
        self._keep(step, stamps)
        return step

    def _is_plain(self, step: VectorStep) -> bool:
        """Tell whether a step gave a row of every env, and all are wanted as they are."""
        return step.timestep.is_full and not self._one_by_one and not self._skipped

    def _keep(self, step: VectorStep, stamps: Ids) -> None:
        if self._is_plain(step):
            self._store.add(self._piece(step, stamps))
            return
        wanted = self._wanted_rows(step)
        env_id = step.timestep.env_id[wanted]
        if self._one_by_one:
            piece = self._piece_by_row(step, stamps, wanted)
        else:
            piece = _rows(self._piece(step, stamps), wanted)
        self._store.add_some(piece, env_id)
        if step.lost:
            self._dropped += self._store.drop(step.lost)

    def _wanted_rows(self, step: VectorStep) -> Ids:
        is_real = ~step.timestep.abnormal
        if not self._skipped:
            return np.flatnonzero(is_real)
        unwanted = np.isin(step.timestep.env_id, list(self._skipped))
        self._dropped += int(np.count_nonzero(is_real & unwanted))
        return np.flatnonzero(is_real & ~unwanted)

    def _piece(self, step: VectorStep, stamps: Ids) -> Piece:
        timestep = step.timestep
        return {
            "obs": step.obs,
            "reward": timestep.reward,
            "next_obs": timestep.next_obs,
            "done": timestep.done,
            "terminated": timestep.terminated,
            "truncated": timestep.truncated,
            "episode_id": step.episode_id,
            "collect_iter": stamps[: len(timestep.done)],
            **step.output,
        }

    def _piece_by_row(self, step: VectorStep, stamps: Ids, wanted: Ids) -> Piece:
        """Let the policy make its transitions, one by one."""
        if len(wanted) == 0:
            return {}
        timestep = step.timestep
        timesteps = list(timestep)
        transitions = collate(
            [
                self._mode.process_transition(
                    _row(step.obs, row),
                    {name: _row(column, row) for name, column in step.output.items()},
                    timesteps[row],
                )
                for row in wanted.tolist()
            ]
        )
        return {
            "done": timestep.done[wanted],
            "terminated": timestep.terminated[wanted],
            "truncated": timestep.truncated[wanted],
            **{str(key): transitions[key] for key in transitions},
            "episode_id": step.episode_id[wanted],
            "collect_iter": stamps[: len(wanted)],
        }

    # Snapshots ------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return counters, episode ids, waiting rows, and the envs' state where they have one."""
        return {
            "stepper": self._stepper.state_dict(),
            "store": self._store.state_dict(),
            "dropped": self._dropped,
            "n_extra": self._n_extra,
            "skipped": sorted(self._skipped),
            "headless": sorted(self._headless),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where the collector was that gave ``state``.

        Where the envs' state cannot be restored, their episodes begin anew, under new ids; rows
        that waited for the end of their episode are dropped then, and counted.
        """
        self._dropped, self._n_extra = state["dropped"], state["n_extra"]
        self._store.load_state_dict(state["store"])
        self._skipped, self._headless = set(state["skipped"]), set(state["headless"])
        if not self._stepper.load_state_dict(state["stepper"]):
            self._dropped += self._store.drop(self._store.open_episodes)
            self._skipped.clear()


def _row(column: Any, row: int) -> Any:
    return column[row] if isinstance(column, torch.Tensor) else index_rows(column, row)


def _rows(piece: Piece, rows: Ids) -> Piece:
    return {name: map_nested(lambda leaf: leaf[rows], column) for name, column in piece.items()}
