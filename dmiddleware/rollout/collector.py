"""Collecting in columns: the core of every collector."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import torch

from dmiddleware.env import BaseEnvManager
from dmiddleware.env.timestep import IdArray
from dmiddleware.policy import CollectMode, HasModes, as_collect_mode
from dmiddleware.rollout.act_inputs import ActInputs
from dmiddleware.rollout.device_rollout import DeviceRollout
from dmiddleware.rollout.episode_watch import EpisodeWatch
from dmiddleware.rollout.row_store import NO_ENV, SPARE_ROWS, Columns, RowStore
from dmiddleware.rollout.stepper import Stepper, VectorStep
from dmiddleware.settings import takes_options
from dmiddleware.tree import Batch, as_tree, index_rows

__all__ = ["RolloutCollector", "even_shares"]

_USER: Final = "RolloutCollector"
_NO_KWARGS: Final[Mapping[str, Any]] = {}
_SPARE_STEPS: Final = 4


class RolloutCollector(Stepper):
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

    Rows of envs that return tensors are tensors on their device, if the policy is there too. Such a
    collector counts steps and episodes when it returns their rows (see :class:`DeviceRollout`).

    Attributes:
        env_manager: the env manager.
        env_num: number of envs, ``E``.
        env_step: transitions made so far, over all envs.
        env_episode: episodes finished so far, over all envs.
        end_rows: the rows of the last batch that end an episode: int64 indices into ``[T * E]``;
            None where only the batch itself tells.
        episode_returns: undiscounted returns of the episodes that ended during the last call.
        episode_lengths: the steps of these episodes.
        episode_successes: 1.0 for each of these episodes that reached its goal, 0.0 for the others;
            only of envs that report it as ``is_success`` or ``success``.
        dropped_steps: transitions that were made and dropped before any call returned them.

    Args:
        policy: a policy or its collect mode; policies written per env work too, row by row.
        env_manager: the envs. The collector launches them if they are closed; the caller closes
            them.

    Raises:
        ConfigError: if ``policy`` is not a policy or ``env_manager`` not an env manager.
    """

    @takes_options
    def __init__(self, policy: HasModes | CollectMode, env_manager: BaseEnvManager) -> None:
        mode = as_collect_mode(policy, user=_USER)
        super().__init__(mode, env_manager, user=_USER)
        self._make_transitions = mode.transitions
        self.dropped_steps = 0
        self.end_rows: IdArray | None = None
        self._on_device: DeviceRollout | None = None
        self._may_use_device = True
        self._n_extra = 0
        self._clear_rows()

    def _clear_rows(self) -> None:
        self._store = RowStore(self.env_num)
        self._collect_iter = np.zeros(self.env_num, np.int64)
        # Envs whose current episode collect_episodes does not want.
        self._skipped: set[int] = set()
        # Ids of episodes whose first rows were skipped, and whose later ones were kept.
        self._partial_ids: set[int] = set()

    @property
    def waiting_steps(self) -> int:
        """Transitions that were made and that no call has returned yet."""
        return len(self._store) if self._on_device is None else self._on_device.n_waiting

    def _make_memory(self) -> ActInputs | None:
        self._on_device = None
        if self._may_use_device:
            self._on_device = DeviceRollout.of(self._mode, self.env_manager)
        return super()._make_memory() if self._on_device is None else None

    def _begin_all(self) -> None:
        super()._begin_all()
        if self._on_device is not None:
            self.dropped_steps += self._on_device.restart(int(self.episode_id[0]))

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
        if policy is not None:
            self._mode = mode = as_collect_mode(policy, user=_USER)
            self._make_transitions = mode.transitions
        if env_manager is not None:
            self._use_envs(env_manager)
        self.dropped_steps += self.waiting_steps
        self._may_use_device = True
        super().reset()
        self._clear_rows()

    def step(
        self,
        policy_kwargs: Mapping[str, Any],
        *,
        random: bool = False,
        only: IdArray | None = None,
    ) -> VectorStep:
        """Make one step as :meth:`Stepper.step` does, and keep its rows for the next batch."""
        step = super().step(policy_kwargs, random=random, only=only)
        timestep = step.timestep
        columns = {
            "obs": step.obs,
            "reward": timestep.reward,
            "next_obs": timestep.next_obs,
            "done": timestep.done,
            "terminated": timestep.terminated,
            "truncated": timestep.truncated,
            "episode_id": step.episode_id,
            "collect_iter": self._collect_iter[: len(timestep.done)],
            **step.inputs,
            **step.output,
        }
        if self._make_transitions is None and not self._skipped and timestep.is_full:
            self._store.add(columns)
        else:
            self._keep_some(step, columns)
        return step

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
        if not len(self.episode_id):
            self.start()  # which finds out where the envs are
        self.begin_call(train_iter)
        n_steps, store = -(-n_sample // self.env_num), self._store
        if self._on_device is not None:
            return self._collect_on_device(
                self._on_device, n_steps, train_iter, policy_kwargs or _NO_KWARGS, random=random
            )
        sources: dict[int, int] = {}
        while len(lacking := store.lacking(n_steps)):
            if len(lacking) < self.env_num and self._can_fill(n_steps, sources):
                break
            # Envs that have enough rows pause, if the manager can step the others without them.
            if self.step(policy_kwargs or _NO_KWARGS, random=random, only=lacking).lost:
                sources.clear()  # their rows may be gone
        return store.take_rectangle(n_steps, sources, self._split_episode)

    def _collect_on_device(
        self,
        rollout: DeviceRollout,
        n_steps: int,
        train_iter: int,
        policy_kwargs: Mapping[str, Any],
        *,
        random: bool,
    ) -> Batch:
        if random:
            self.check_random_actions()
        gathered = rollout.collect(
            n_steps,
            # As many episodes may end, and a vector env may fail a few times.
            first_new_id=int(self._new_ids((n_steps + _SPARE_STEPS) * self.env_num)[0]),
            train_iter=train_iter,
            policy_kwargs=policy_kwargs,
            random=random,
        )
        self._next_id, self._revision = gathered.next_id, self.env_manager.revision
        self.env_step += n_steps * self.env_num
        self.env_episode += len(gathered.ends)
        self.dropped_steps += gathered.n_dropped
        self.episode_returns, self.episode_lengths = gathered.returns, gathered.lengths
        self.episode_successes, self.end_rows = gathered.successes, gathered.ends
        return gathered.batch

    def collect_step(
        self,
        *,
        train_iter: int = 0,
        policy_kwargs: Mapping[str, Any] | None = None,
        random: bool = False,
    ) -> tuple[Batch, IdArray]:
        """Collect one transition of every env, or fewer where some envs spend the step on a reset.

        Arguments and errors are those of :meth:`collect`.

        Returns:
            A batch ``[R, …]``, and the env of each row, ``[R] int64``.
        """
        self.start()
        if not self.env_manager.in_lockstep or self._on_device is not None:
            batch = self.collect(
                self.env_num, train_iter=train_iter, policy_kwargs=policy_kwargs, random=random
            )
            return index_rows(batch, 0), np.arange(self.env_num)
        self.begin_call(train_iter)
        while len(self._store) == 0:
            self.step(policy_kwargs or _NO_KWARGS, random=random)
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

        The other arguments are those of :meth:`collect`, and so are the errors. ``n_episode`` must
        be positive.

        Returns:
            Batches ``[T_i, …]``, one per episode, in the order in which the episodes ended.
        """
        if n_episode <= 0:
            raise ValueError(f"n_episode must be positive, got {n_episode}")
        self.start()
        if self._on_device is not None:
            # The ends of single episodes are found on the host, step by step.
            self._give_up_all_episodes()
            self._may_use_device = False
            self._memory = self._make_memory()
        self.begin_call(train_iter, keeps_skipping=True)
        self._give_up_cut_episodes()
        shares, self._n_extra = even_shares(n_episode, self.env_num, self._n_extra)
        most = 2 * np.maximum(shares, 1)
        finished = self._store.n_ends
        watch = EpisodeWatch(self.env_manager, user="collect_episodes")
        while (lacking := np.flatnonzero(finished < shares)).size:
            step = self.step(policy_kwargs or _NO_KWARGS, random=random, only=lacking)
            for env in step.ended:
                finished[env] += env not in self._skipped
            for env in step.begun:
                (self._skipped.add if finished[env] >= most[env] else self._skipped.discard)(env)
            watch.check(lacking.tolist())
        return self._store.take_episodes(shares)

    def take(self) -> Batch:
        """Take all rows that wait.

        Returns:
            A batch ``[T, E, …]`` if every env has made a transition in each step, and else
            ``[R, …]``, env by env.
        """
        return self._store.take_waiting()

    def missing_in_lanes(self, n_sample: int) -> int:
        """Return how many rows :meth:`take_lanes` would lack."""
        n_steps = -(-n_sample // self.env_num)
        lacks = int((n_steps - self._store.counts).clip(0).sum())
        return 0 if lacks and self._can_fill(n_steps, {}) else lacks

    def take_lanes(self, n_sample: int) -> Batch:
        """Take the rows that wait, as many of every env; the others wait on.

        Args:
            n_sample: the least number of rows, none of which is missing.

        Returns:
            A batch ``[T, E, …]``, of lanes as :meth:`collect` has them.
        """
        sources: dict[int, int] = {}
        n_steps, n_whole = -(-n_sample // self.env_num), int(self._store.counts.min())
        if n_whole < n_steps:
            self._can_fill(n_steps, sources)
        return self._store.take_rectangle(max(n_steps, n_whole), sources, self._split_episode)

    def _is_on_device(self) -> bool:
        """Return whether rows are collected on a device; launches the envs if they are closed."""
        self._open()
        return self._on_device is not None

    def begin_call(self, train_iter: int, *, keeps_skipping: bool = False) -> None:
        """Begin a call that makes steps, and then takes rows; :meth:`collect` does so itself.

        Args:
            train_iter: the policy's iteration, written to the rows as ``collect_iter``.
            keeps_skipping: whether episodes that a call did not want stay unwanted.
        """
        self.episode_returns, self.episode_lengths, self.episode_successes = [], [], []
        self.end_rows = None
        if self._revision != self.env_manager.revision and len(self.episode_id):
            self._give_up_all_episodes()
        if self._skipped and not keeps_skipping:
            self._partial_ids.update(self.episode_id[list(self._skipped)].tolist())
            self._skipped.clear()
        if self._collect_iter[0] != train_iter:  # earlier steps refer to the old array
            self._collect_iter = np.full(self.env_num, train_iter, np.int64)

    def _give_up_all_episodes(self) -> None:
        """Start new episodes, because something else has launched, reset or stepped the envs."""
        self.dropped_steps += self._store.drop(self.episode_id)
        self._skipped.clear()
        if self._on_device is not None or any(self.env_manager.episode_lengths):
            self.env_manager.reset()
        self._mode.reset()
        self._begin_all()

    def _give_up_cut_episodes(self) -> None:
        """Start new episodes in place of those of which a call has returned some rows."""
        cut = np.union1d(self._store.cut_episodes, np.array(list(self._partial_ids), np.int64))
        self._partial_ids.clear()
        self.dropped_steps += self._store.drop(cut)
        env_ids = np.flatnonzero(np.isin(self.episode_id, cut)).tolist()
        if env_ids:
            self.env_manager.reset(env_ids)
            self._revision = self.env_manager.revision
            self._begin_episodes(env_ids)

    def _can_fill(self, n_steps: int, sources: dict[int, int]) -> bool:
        """Return whether other envs have rows for the lanes of all envs that lack some.

        Args:
            n_steps: the rows of a lane.
            sources: the env whose rows fill the lane of another one, by that one; new ones are
                added.
        """
        if not self.env_manager.in_lockstep:
            return False
        counts = self._store.counts
        has_spare = counts >= 2 * n_steps + SPARE_ROWS
        has_spare[[*sources, *sources.values()]] = False
        spare = np.flatnonzero(has_spare)
        lacks = counts < n_steps
        lacks[list(sources)] = False
        lacking = np.flatnonzero(lacks)
        sources.update(zip(lacking.tolist(), spare.tolist(), strict=False))
        return len(lacking) <= len(spare)

    def _split_episode(self, episode_id: int) -> int:
        """Give the remaining rows of an episode a new id, and return that id."""
        rest = int(self._new_ids(1)[0])
        self.episode_id = np.where(self.episode_id == episode_id, rest, self.episode_id)
        return rest

    def _keep_some(self, step: VectorStep, columns: Columns) -> None:
        """Keep the rows of a step that are transitions and belong to episodes that are wanted."""
        timestep = step.timestep
        is_kept = timestep.valid
        if self._skipped:
            unwanted = np.isin(timestep.env_id, list(self._skipped))
            self.dropped_steps += int(np.count_nonzero(is_kept & unwanted))
            is_kept = is_kept & ~unwanted
        if self._make_transitions is None:
            self._store.add(columns, np.where(is_kept, timestep.env_id, NO_ENV))
        elif is_kept.any():
            rows = np.flatnonzero(is_kept)
            self._store.add(self._transitions(step, rows), timestep.env_id[rows])
        if step.lost:
            self.dropped_steps += self._store.drop(step.lost)

    def _transitions(self, step: VectorStep, rows: IdArray) -> Columns:
        """Return the transitions that the policy makes itself of some rows, as columns."""
        assert self._make_transitions is not None
        timestep, index = step.timestep, torch.from_numpy(rows)
        transitions = self._make_transitions(step.obs, step.output, timestep, rows)
        return {
            "done": timestep.done[rows],
            "terminated": timestep.terminated[rows],
            "truncated": timestep.truncated[rows],
            **{name: index_rows(column, index) for name, column in step.inputs.items()},
            **{str(key): transitions[key] for key in transitions},
            "episode_id": step.episode_id[rows],
            "collect_iter": self._collect_iter[: len(rows)],
        }

    def state_dict(self) -> dict[str, Any]:
        """Return counters, episode ids, waiting rows, and the envs' state where they have one."""
        return {
            "on_device": None if self._on_device is None else self._on_device.state_dict(),
            "stepper": super().state_dict(),
            "store": self._store.state_dict(),
            "dropped": self.dropped_steps,
            "n_extra": self._n_extra,
            "skipped": sorted(self._skipped),
            "partial_ids": sorted(self._partial_ids),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> bool:
        """Restore what :meth:`state_dict` returned, to continue where that collector was.

        Where the state of the envs cannot be restored, they start new episodes with new ids, and
        the waiting rows of unfinished episodes are dropped and counted. Rows that were collected on
        the host are continued there.

        Returns:
            Whether the envs continue their episodes.
        """
        self.dropped_steps, self._n_extra = state["dropped"], state["n_extra"]
        stepper, on_device = state["stepper"], state.get("on_device")
        self._may_use_device = on_device is not None or not stepper["episode_id"]
        if on_device is not None and stepper["envs"] is not None and not self._is_on_device():
            stepper = {**stepper, "envs": None}
        self._store.load_state_dict(state["store"])
        self._skipped, self._partial_ids = set(state["skipped"]), set(state["partial_ids"])
        if super().load_state_dict(stepper):
            if self._on_device is not None:
                self._on_device.load_state_dict(state["on_device"])
            return True
        self._may_use_device = True
        self.dropped_steps += self._store.drop(self._store.open_episodes)
        if on_device is not None:
            self.dropped_steps += sum(int(valid.sum()) for valid in on_device["valid"])
        self._skipped.clear()
        return False


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
