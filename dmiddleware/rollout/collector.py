"""Collecting in columns: the core of every collector."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import torch

from dmiddleware.env import BaseEnvManager
from dmiddleware.env.timestep import IdArray
from dmiddleware.policy import CollectMode, HasModes, as_collect_mode
from dmiddleware.rollout.episode_watch import EpisodeWatch
from dmiddleware.rollout.row_store import Columns, RowStore
from dmiddleware.rollout.stepper import Stepper, VectorStep, check_random_actions
from dmiddleware.tree import Batch, as_tree, index_rows

__all__ = ["RolloutCollector", "even_shares"]

_USER: Final = "RolloutCollector"
_NO_KWARGS: Final[Mapping[str, Any]] = {}
_SPARE_ROWS: Final = 64


class RolloutCollector:
    """Collects transitions from all envs of a manager, as batches of columns.

    The columns are ``obs``, ``action``, ``reward`` float32, ``next_obs`` (the true successor),
    ``done``, ``terminated``, ``truncated``, ``episode_id`` int64, ``collect_iter`` int64 and
    everything else that the policy's forward returns. (A mode with ``transitions`` decides on
    the first six itself.) Rows of one env and one episode share an
    ``episode_id`` that no other episode has, in this run or any other, and follow each other in the
    env's lane, also from one batch to the next.

    The inputs that the policy declares in ``act_inputs`` are columns of the same names; a declared
    ``action_mask`` comes with ``next_action_mask``, the masks of the successors. If the policy is
    recurrent, ``state`` is the state with which it acted. The collector holds that state.

    Nothing is lost between calls: an episode that is cut at the end of a call continues in the next
    one, and rows that do not fit into a rectangle wait for the next one. If envs step in lockstep
    and some spend steps on their resets, the others get ahead. Once an env has many waiting rows, a
    batch puts some of them into the lane of an env that lacks rows, and the rest of their episode
    gets another ``episode_id``.

    Rows of an unfinished episode are dropped, and counted, only if its env fails, or if something
    else launches, resets or steps the envs between two calls. In that case the collector starts new
    episodes in all of them.

    Args:
        policy: a policy or its collect mode; policies written per env work too, row by row.
        env_manager: the envs. The collector launches them if they are closed; the caller closes
            them.

    Raises:
        ConfigError: if ``policy`` is not a policy or ``env_manager`` not an env manager.
    """

    def __init__(self, policy: HasModes | CollectMode, env_manager: BaseEnvManager) -> None:
        self._use_mode(as_collect_mode(policy, user=_USER))
        self._stepper = Stepper(self._mode, env_manager, user=_USER)
        self._store = RowStore(env_manager.env_num)
        self._dropped = 0
        self._stamps = np.zeros(env_manager.env_num, np.int64)
        # Envs whose current episode collect_episodes does not want.
        self._skipped: set[int] = set()
        # Ids of episodes whose first rows were skipped, and whose later ones were kept.
        self._headless: set[int] = set()
        self._n_extra = 0

    def _use_mode(self, mode: CollectMode) -> None:
        self._mode = mode
        self._make_transitions = mode.transitions

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
        """The rows that end an episode in the batch that :meth:`collect` returned last.

        int64 indices into the batch flattened to ``[T * E, …]``.
        """
        return self._store.ends

    @property
    def dropped_steps(self) -> int:
        """Transitions that were made and dropped before any call returned them."""
        return self._dropped

    @property
    def waiting_steps(self) -> int:
        """Transitions that were made and that no call has returned yet."""
        return len(self._store)

    def start(self) -> None:
        """Launch the envs if they are closed, and check that the policy fits them.

        Collecting does this too, the first time.

        Raises:
            SpaceError: if the policy's model does not fit the envs' spaces.
        """
        if not self._stepper.has_started:
            self._stepper.start()
        elif self.env_manager.closed:
            self.env_manager.launch()

    def check_random_actions(self) -> None:
        """Check before the first step that random actions are possible.

        Raises:
            ConfigError: if the policy is on-policy: it learns from the actions of its own
                distribution only.
        """
        check_random_actions(self._mode, user=_USER)

    def reset(
        self,
        *,
        policy: HasModes | CollectMode | None = None,
        env_manager: BaseEnvManager | None = None,
    ) -> None:
        """Start new episodes in all envs and drop the rows that wait; counters are kept.

        Args:
            policy: act with another policy from now on.
            env_manager: act in other envs from now on; launched if they are closed.

        Raises:
            ConfigError: if an argument has the wrong type.
            SpaceError: if the policy's model does not fit the envs' spaces.
        """
        mode = None if policy is None else as_collect_mode(policy, user=_USER)
        self._stepper.reset(mode=mode, env_manager=env_manager)
        if mode is not None:
            self._use_mode(mode)
        self._dropped += len(self._store)
        self._store = RowStore(self.env_num)
        self._stamps = np.zeros(self.env_num, np.int64)
        self._skipped.clear()
        self._headless.clear()

    def collect(
        self,
        n_sample: int,
        *,
        train_iter: int = 0,
        policy_kwargs: Mapping[str, Any] | None = None,
        random: bool = False,
    ) -> Batch:
        """Collect transitions, the same number from every env (lockstep envs: see the class).

        Args:
            n_sample: the least number of transitions; rounded up to a multiple of the number of
                envs.
            train_iter: the policy's iteration, written to the rows as ``collect_iter``.
            policy_kwargs: passed to the policy's forward, for example ``{"eps": 0.1}``.
            random: replace the policy's actions by random ones, drawn with the env manager's seed.
                The policy is still called for its other columns.

        Returns:
            A batch ``[T, E, …]`` with ``T = ceil(n_sample / E)``; the caller owns its memory.

        Raises:
            ValueError: if ``n_sample`` is not positive.
            ConfigError: if ``random`` and the policy is on-policy.
            PolicyOutputError: if the policy does not return one row per env, with ``action``.
            SpaceError: at the first call, if the policy's model does not fit the envs.
            EnvCrashed: if an env keeps failing.
        """
        if n_sample <= 0:
            raise ValueError(f"n_sample must be positive, got {n_sample}")
        n_steps = -(-n_sample // len(self._stamps))
        stamps = self._begin_call(train_iter)
        kwargs = policy_kwargs or _NO_KWARGS
        store = self._store
        if n_steps == 1 and store.is_empty:
            # The most common case skips what the others need.
            step = self._stepper.step(kwargs, random=random)
            if self._is_plain(step):
                return store.pass_on(self._columns(step, stamps))
            self._keep(step, stamps)
        loans: dict[int, int] = {}
        while not self._is_filled(n_steps, loans):
            # Envs that have enough rows pause, if the manager can step the others without them.
            lacking = None if store.is_level else np.flatnonzero(store.counts < n_steps)
            if self._step(kwargs, stamps, random, lacking).lost:
                loans.clear()  # the rows to be lent may be gone
        return store.take_rectangle(n_steps, loans, self._stepper.split_episode)

    def collect_step(
        self,
        *,
        train_iter: int = 0,
        policy_kwargs: Mapping[str, Any] | None = None,
        random: bool = False,
    ) -> tuple[Batch, IdArray]:
        """Collect one transition of every env, or fewer where some envs spend the step on a reset.

        Args:
            train_iter: as in :meth:`collect`.
            policy_kwargs: as in :meth:`collect`.
            random: as in :meth:`collect`.

        Returns:
            A batch ``[R, …]``, and the env of each row, ``[R] int64``.

        Raises:
            ConfigError: as in :meth:`collect`; so are the following.
            PolicyOutputError: if the policy returns something invalid.
            SpaceError: at the first call, if the policy's model does not fit the envs.
            EnvCrashed: if an env keeps failing.
        """
        if not self.env_manager.in_lockstep:
            batch = self.collect(
                self.env_num, train_iter=train_iter, policy_kwargs=policy_kwargs, random=random
            )
            return index_rows(batch, 0), np.arange(self.env_num)
        stamps = self._begin_call(train_iter)
        while len(self._store) == 0:
            self._step(policy_kwargs or _NO_KWARGS, stamps, random, None)
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
        """Collect whole episodes, a fixed share from every env, to avoid favoring short ones.

        The shares are fixed before the first step; "the first ``n_episode`` that end" would favor
        short episodes. They differ by at most one, and the extra episodes go to other envs in the
        next call. An env that has delivered its share pauses. Where the manager cannot step some
        envs without the others, the next episodes of that env are kept for the next call, at most
        as many as its share; later ones are dropped and counted. Episodes whose first rows an
        earlier call has already returned are abandoned, and their waiting rows are counted as
        dropped. An episode that does not end is reported as in :func:`evaluate_episodes`.

        Args:
            n_episode: how many.
            train_iter: as in :meth:`collect`.
            policy_kwargs: as in :meth:`collect`.
            random: as in :meth:`collect`.

        Returns:
            Batches ``[T_i, …]``, one per episode, in the order in which the episodes ended.

        Raises:
            ValueError: if ``n_episode`` is not positive.
            ConfigError: as in :meth:`collect`; so are the following.
            PolicyOutputError: if the policy returns something invalid.
            SpaceError: at the first call, if the policy's model does not fit the envs.
            EnvCrashed: if an env keeps failing.
        """
        if n_episode <= 0:
            raise ValueError(f"n_episode must be positive, got {n_episode}")
        stamps = self._begin_call(train_iter, keeps_skipping=True)
        self._give_up_cut_episodes()
        shares = self._shares(n_episode)
        most = 2 * np.maximum(shares, 1)
        finished = self._store.n_ends
        watch = EpisodeWatch(self.env_manager, user="collect_episodes")
        while (lacking := np.flatnonzero(finished < shares)).size:
            step = self._step(policy_kwargs or _NO_KWARGS, stamps, random, lacking)
            for env in step.ended:
                finished[env] += env not in self._skipped
            for env in step.begun:
                (self._skipped.add if finished[env] >= most[env] else self._skipped.discard)(env)
            watch.check(lacking.tolist())
        return self._store.take_episodes(shares)

    def _begin_call(self, train_iter: int, *, keeps_skipping: bool = False) -> IdArray:
        """Prepare for the call's first step; return the column ``collect_iter`` of its steps."""
        self._stepper.episode_returns = []
        given_up = self._stepper.give_up_foreign_episodes()
        if len(given_up):
            self._dropped += self._store.drop(given_up)
            self._skipped.clear()
        if self._skipped and not keeps_skipping:
            self._headless.update(self._stepper.episode_id[list(self._skipped)].tolist())
            self._skipped.clear()
        if self._stamps[0] != train_iter:
            self._stamps = np.full(len(self._stamps), train_iter, np.int64)
        return self._stamps

    def _is_filled(self, n_steps: int, loans: dict[int, int]) -> bool:
        """Return whether every lane can be filled; add to ``loans`` the lender of each borrower."""
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

    def _shares(self, n_episode: int) -> IdArray:
        shares, self._n_extra = even_shares(n_episode, self.env_num, self._n_extra)
        return shares

    def _give_up_cut_episodes(self) -> None:
        cut = np.union1d(self._store.cut_episodes, np.array(list(self._headless), np.int64))
        self._headless.clear()
        self._dropped += self._store.drop(cut)
        self._stepper.restart(np.flatnonzero(np.isin(self._stepper.episode_id, cut)))

    def _step(
        self, policy_kwargs: Mapping[str, Any], stamps: IdArray, random: bool, only: IdArray | None
    ) -> VectorStep:
        step = self._stepper.step(policy_kwargs, random=random, only=only)
        self._keep(step, stamps)
        return step

    def _is_plain(self, step: VectorStep) -> bool:
        """Return whether a step gave one row per env and all of them are stored as they are."""
        return step.timestep.is_full and self._make_transitions is None and not self._skipped

    def _is_rectangle(self, step: VectorStep) -> bool:
        """Return whether a step gave one row per env, of which some are not transitions."""
        covers_all = len(step.timestep) == self.env_num and not step.lost
        return covers_all and self._make_transitions is None and not self._skipped

    def _keep(self, step: VectorStep, stamps: IdArray) -> None:
        if self._is_plain(step):
            self._store.add(self._columns(step, stamps))
            return
        if self._is_rectangle(step):
            self._store.add(self._columns(step, stamps), step.timestep.valid)
            return
        wanted = self._wanted_rows(step)
        env_id = step.timestep.env_id[wanted]
        if self._make_transitions is not None:
            columns = self._transitions(step, stamps, wanted)
        else:
            columns = index_rows(self._columns(step, stamps), wanted)
        self._store.add_some(columns, env_id)
        if step.lost:
            self._dropped += self._store.drop(step.lost)

    def _wanted_rows(self, step: VectorStep) -> IdArray:
        is_real = step.timestep.valid
        if not self._skipped:
            return np.flatnonzero(is_real)
        unwanted = np.isin(step.timestep.env_id, list(self._skipped))
        self._dropped += int(np.count_nonzero(is_real & unwanted))
        return np.flatnonzero(is_real & ~unwanted)

    def _columns(self, step: VectorStep, stamps: IdArray) -> Columns:
        timestep = step.timestep
        return {
            "obs": step.obs,
            "reward": timestep.reward,
            "next_obs": timestep.next_obs,
            "done": timestep.done,
            "terminated": timestep.terminated,
            "truncated": timestep.truncated,
            "episode_id": step.episode_id,
            "collect_iter": stamps if timestep.is_full else stamps[: len(timestep.done)],
            **step.inputs,
            **step.output,
        }

    def _transitions(self, step: VectorStep, stamps: IdArray, wanted: IdArray) -> Columns:
        """Return the transitions that the policy makes itself, as columns."""
        if len(wanted) == 0:
            return {}
        assert self._make_transitions is not None
        timestep, kept = step.timestep, torch.from_numpy(wanted)
        transitions = self._make_transitions(step.obs, step.output, timestep, wanted)
        return {
            "done": timestep.done[wanted],
            "terminated": timestep.terminated[wanted],
            "truncated": timestep.truncated[wanted],
            **{name: index_rows(column, kept) for name, column in step.inputs.items()},
            **{str(key): transitions[key] for key in transitions},
            "episode_id": step.episode_id[wanted],
            "collect_iter": stamps[: len(wanted)],
        }

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
        """Restore what :meth:`state_dict` returned, to continue where that collector was.

        Where the state of the envs cannot be restored, they start new episodes with new ids, and
        the waiting rows of unfinished episodes are dropped and counted.
        """
        self._dropped, self._n_extra = state["dropped"], state["n_extra"]
        self._store.load_state_dict(state["store"])
        self._skipped, self._headless = set(state["skipped"]), set(state["headless"])
        if not self._stepper.load_state_dict(state["stepper"]):
            self._dropped += self._store.drop(self._store.open_episodes)
            self._skipped.clear()


def even_shares(n_episode: int, env_num: int, first: int) -> tuple[IdArray, int]:
    """Spread episodes over envs, so that the shares differ by at most one.

    Args:
        n_episode: number of episodes.
        env_num: number of envs.
        first: the env that gets the first of the extra episodes.

    Returns:
        The share of each env, and the next ``first``, so that other envs get the next extra ones.
    """
    share, n_extra = divmod(n_episode, env_num)
    order = (np.arange(env_num) - first) % env_num
    return share + (order < n_extra), (first + n_extra) % env_num
