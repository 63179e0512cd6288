"""Envs that are stepped in parallel, in separate processes."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import cloudpickle
from gymnasium import spaces

from dmiddleware.env.batching import NestedArrays, copy_arrays, index_rows, make_write, replace_rows
from dmiddleware.env.env_access import Access
from dmiddleware.env.manager import BaseEnvManager, check_env_fns
from dmiddleware.env.pictures import Frame, Picture
from dmiddleware.env.subprocess.pool import EnvProcesses, ProcessFailure
from dmiddleware.env.subprocess.worker import Given, StepInfos
from dmiddleware.env.sync_manager import EnvFn, probe_spaces
from dmiddleware.env.timestep import BatchedTimestep
from dmiddleware.errors import ConfigError, EnvCallError, EnvStateError, StructureError
from dmiddleware.foreign_names import checks_options
from dmiddleware.settings import Count, Positive, checked

__all__ = ["AsyncEnvManager"]


class AsyncEnvManager(BaseEnvManager):
    """Steps its envs in parallel, in separate processes.

    Use it for envs that take a millisecond or more per step, and for envs that crash or hang: if an
    env raises, its process dies, or it does not answer in time, its process is restarted while the
    other envs continue. The log shows where the env hung or crashed, as far as Python can tell.
    Observations travel through shared memory. The processes are new interpreters, which do not
    import the program's main module; factories are sent to them with cloudpickle.

    Args:
        env_fns: one factory per env; all envs have the same spaces.
        seed: an integer or one seed per env, see :meth:`seed`.
        max_retry: how often one env may be restarted in a row before
            :class:`~dmiddleware.errors.EnvCrashed` or :class:`~dmiddleware.errors.EnvTimeout` is
            raised; the count starts again when the env finishes an episode.
        step_timeout_s: how long a step of one env may take.
        reset_timeout_s: how long a reset of one env, or the start of its process, may take.
        close_timeout_s: how long closing the envs may take before their processes are killed.
        envs_per_process: how many envs share a process; when one of them fails, the episodes of all
            of them are lost.

    Raises:
        ConfigError: if ``env_fns`` is empty, or an option is not positive.
    """

    @checks_options
    def __init__(
        self,
        env_fns: Sequence[EnvFn],
        *,
        seed: int | Sequence[int] | None = None,
        max_retry: int = 3,
        step_timeout_s: float = 60.0,
        reset_timeout_s: float = 60.0,
        close_timeout_s: float = 5.0,
        envs_per_process: int = 1,
    ) -> None:
        self._env_fns = check_env_fns(env_fns)
        super().__init__(len(self._env_fns), seed=seed, max_retry=max_retry)
        self._step_timeout_s: float = checked("step_timeout_s", step_timeout_s, Positive)
        self._reset_timeout_s: float = checked("reset_timeout_s", reset_timeout_s, Positive)
        self._close_timeout_s: float = checked("close_timeout_s", close_timeout_s, Positive)
        self._envs_per_process: int = checked("envs_per_process", envs_per_process, Count)
        self._pool: EnvProcesses | None = None
        self._cut: set[int] = set()

    @property
    def pids(self) -> tuple[int, ...]:
        """The process ids; empty while the manager is closed."""
        return () if self._pool is None else self._pool.pids

    def launch(self) -> None:
        """Start the processes and reset the envs, see :meth:`BaseEnvManager.launch`."""
        self._require_closed()
        self._begin()
        self._cut = set()
        self._pool = EnvProcesses(
            self._env_fns,
            envs_per_process=self._envs_per_process,
            step_timeout_s=self._step_timeout_s,
            reset_timeout_s=self._reset_timeout_s,
        )
        with self._closing_on_error():
            infos, failures = self._pool.start(self._take_seeds(), self._given())
            for failure in failures:
                raise failure.final("which is not retried while envs are launched")
            self._set_spaces(*self._pool.spaces)
            self._write_action = make_write(self._pool.spaces[1])
            self._open = True
            self._install_first_obs(range(self.env_num), infos)
            if self._fixes_seeds:
                self._send_seeds([None] * self.env_num)

    def close(self) -> None:
        """Close the envs and end their processes; a second call does nothing."""
        self._open = False
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.close(timeout_s=self._close_timeout_s)

    def reset(self, env_ids: Iterable[int] | None = None) -> None:
        """Start new episodes in some envs, see :meth:`BaseEnvManager.reset`."""
        self._require_open("reset")
        ids = self._checked_ids(env_ids)
        with self._closing_on_error():
            begun = dict.fromkeys(ids, (None, None))
            infos, failures = self._running.ask(b"r", begun, "reset")
            # Envs that shared the process of one that failed have lost their episodes too.
            lost = _envs_of(failures).difference(ids)
            infos |= self._restart_lost(failures, lost)
            self._install_first_obs(sorted(lost.union(ids)), infos)

    def step(self, actions: NestedArrays | Mapping[int, Any]) -> BatchedTimestep:
        """Step the envs, and reset those whose episode ended, see :meth:`BaseEnvManager.step`."""
        self._require_open("step")
        ids, batch = self._assign(actions)
        rows = self._split(batch)
        with self._closing_on_error():
            for row, action in enumerate(rows):
                env_id = row if ids is None else ids[row]
                self._write_action(self._running.memory.action, env_id, action)
            infos, failures = self._running.step(ids)
            lost: set[int] = set()
            if failures:
                self._reject_bad_actions(failures, ids, rows)
                lost = _envs_of(failures)
                self.dropped_steps += sum(map(self._totals.length_of, lost))
                infos.first |= self._restart(failures)
                if ids is not None:
                    ids += sorted(lost.difference(ids))
            return self._assemble(ids, infos, lost)

    def keep_last_frames(self, env_ids: Iterable[int]) -> None:
        """Choose the envs of which :meth:`last_frame` has the ends of episodes from now on."""
        before = self._filmed
        super().keep_last_frames(env_ids)
        changed = {env_id: env_id in self._filmed for env_id in before ^ self._filmed}
        if changed:
            self._ask_until_answered(b"f", changed, "keep_last_frames")

    def last_frame(self, env_id: int) -> Frame | None:
        """Return the image of the last state of an episode, see the base class."""
        self._last_pictures |= self._ask_until_answered(b"p", {env_id: True}, "last_frame")
        return super().last_frame(env_id)

    def _pictures(self, env_ids: list[int]) -> list[Picture]:
        pictures = self._ask_until_answered(b"p", dict.fromkeys(env_ids, False), "render")
        return [pictures[env_id] for env_id in env_ids]

    # Results

    def _assemble(self, ids: list[int] | None, infos: StepInfos, lost: set[int]) -> BatchedTimestep:
        """Copy a step's results out of the shared memory.

        Args:
            ids: the envs of the rows; None: all.
            infos: those of the step and, also for restarted envs, of the resets.
            lost: the envs that were restarted.
        """
        memory, index = self._running.memory, slice(None) if ids is None else ids
        env_ids = self._id_array(ids).tolist()
        next_obs = copy_arrays(memory.next_obs) if ids is None else index_rows(memory.next_obs, ids)
        reward = memory.reward[index].copy()
        terminated, truncated = memory.terminated[index].copy(), memory.truncated[index].copy()
        done = terminated | truncated
        last = infos.last
        failed = None
        if lost or self._cut:
            failed = [row for row, env_id in enumerate(env_ids) if env_id in lost | self._cut]
            renewed = [row for row in failed if done[row] or env_ids[row] in lost]
            next_obs = self._with_first_obs(next_obs, renewed, env_ids)
            for array in (reward, terminated, truncated, done):
                array[failed] = 0
            for env_id in (env_ids[row] for row in failed):
                infos_now = infos.first if env_id in lost else last
                last[env_id] = {**infos_now.get(env_id, {}), "abnormal": True}
            self._cut.difference_update(env_ids)
        self._count_step(ids, next_obs, reward)
        self._replace_infos(env_ids, [last.get(env_id, {}) for env_id in env_ids])
        obs, returns = next_obs, list[Any]()
        if done.any():
            ended = done.nonzero()[0].tolist()
            obs = self._with_first_obs(next_obs, ended, env_ids)
            for env_id in (env_ids[row] for row in ended):
                last[env_id] = {**self._totals.end(env_id), **last.get(env_id, {})}
                returns.append(last[env_id]["eval_episode_return"])
                self.failures.in_a_row[env_id] = 0
                infos.first.setdefault(env_id, {})
        self._replace_infos(infos.first, infos.first.values())
        last_infos = [last.get(env_id, {}) for env_id in env_ids]
        return self._finish(
            ids, obs, next_obs, reward, done, terminated, truncated, last_infos, failed, returns
        )

    def _with_first_obs(
        self, obs: NestedArrays, rows: list[int], env_ids: list[int]
    ) -> NestedArrays:
        """Return a copy of ``obs`` with the first observations of new episodes in some rows."""
        if not rows:
            return obs
        fresh = index_rows(self._running.memory.first_obs, [env_ids[row] for row in rows])
        return replace_rows(obs, rows, fresh)

    def _install_first_obs(self, ids: Sequence[int], infos: Mapping[int, Any]) -> None:
        first_obs = index_rows(self._running.memory.first_obs, list(ids))
        self._install_reset(ids, first_obs, [infos[env_id] for env_id in ids])

    # Failures

    def _restart(self, failures: list[ProcessFailure]) -> dict[int, Any]:
        """Restart the processes that failed, until all their envs are reset.

        Returns:
            The infos of the resets, by env id.
        """
        infos: dict[int, Any] = {}
        while failures:
            for failure in failures:
                if failure.is_final:
                    raise failure.final("which would happen again")
                self.failures.record_failure(
                    failure.env_id, failure.doing, failure.error, failure.details, failure.cause
                )
                n_restarts = map(self.failures.restarts_of, failure.env_ids)
                self._reseed(failure.env_ids, sum(n_restarts))
            self._filmed -= _envs_of(failures)  # the new processes have not heard of it
            begun, failures = self._running.restart(failures, self._take_seeds(), self._given())
            infos |= begun
            if self._fixes_seeds:
                self._send_seeds([None] * self.env_num)
        return infos

    def _restart_lost(self, failures: list[ProcessFailure], lost: set[int]) -> dict[int, Any]:
        """Restart processes between two steps; the next step reports the episodes that are lost."""
        self._cut |= lost
        self.dropped_steps += sum(map(self._totals.length_of, lost))
        return self._restart(failures)

    def _reject_bad_actions(
        self, failures: Iterable[ProcessFailure], ids: list[int] | None, rows: list[Any]
    ) -> None:
        """Report an action outside the action space as such, not as a crash of the env."""
        for failure in failures:
            if failure.doing != "step" or (ids is not None and failure.env_id not in ids):
                continue
            action = rows[failure.env_id if ids is None else ids.index(failure.env_id)]
            if not self.action_space.contains(action):
                raise StructureError(
                    f"env {failure.env_id} was given the action {action!r}, which is not in its "
                    f"action space {self.action_space}, and {failure.error}\n{failure.details}"
                )

    def _take_seeds(self) -> dict[int, int]:
        seeds, self._pending_seeds = self._pending_seeds, {}
        return seeds

    # Processes

    @property
    def _running(self) -> EnvProcesses:
        assert self._pool is not None
        return self._pool

    def _ask(self, kind: bytes, values: Mapping[int, Any], doing: str) -> dict[int, Any]:
        """Send a request whose failure closes the manager, since it cannot be repeated."""
        with self._closing_on_error():
            answers, failures = self._running.ask(kind, values, doing)
            for failure in failures:
                raise failure.final("which cannot be retried")
            return answers

    def _seed_envs(self, seeds: list[int]) -> None:
        if self._open:
            self._send_seeds(seeds)
        else:
            super()._seed_envs(seeds)

    def _send_seeds(self, seeds: Sequence[int | None]) -> None:
        """Send the seeds of the next resets, and those of all later ones."""
        fixed = self._seeds if self._fixes_seeds and self._seeds else [None] * self.env_num
        self._ask(b"d", dict(enumerate(zip(seeds, fixed, strict=True))), "seed")

    # What a program gives to the envs

    def _access(self, accesses: list[Access]) -> list[Any]:
        doing = str(accesses[0])
        requests = {
            env_id: _pickled(access, f"what {doing} was given")
            for env_id, access in enumerate(accesses)
        }
        answers = self._ask_until_answered(b"a", requests, doing)
        for env_id in requests:
            if isinstance(answers[env_id], EnvCallError):
                raise answers[env_id]
        return [pickle.loads(answers[env_id]) for env_id in requests]

    def _use_reset_options(self, options: list[dict[str, Any] | None]) -> None:
        pickled = dict(
            enumerate(_pickled(env_options, "the reset options") for env_options in options)
        )
        super()._use_reset_options(options)
        if self._open:
            self._ask_until_answered(b"o", pickled, "set_reset_options")

    def _ask_until_answered(
        self, kind: bytes, requests: Mapping[int, Any], doing: str
    ) -> dict[int, Any]:
        """Send a request to envs; restart processes that fail, and ask their new envs again."""
        if self._running.is_busy:
            raise EnvStateError(
                f"{doing} was called while another thread waits for the envs; call it from the "
                "thread that steps them, such as in a middleware, not in an event handler"
            )
        answers: dict[int, Any] = {}
        with self._closing_on_error():
            while requests:
                answered, failures = self._running.ask(kind, requests, doing)
                answers |= answered
                lost = _envs_of(failures)
                if lost:
                    infos = self._restart_lost(failures, lost)
                    self._install_first_obs(sorted(lost), infos)
                requests = {env_id: requests[env_id] for env_id in lost}
        return answers

    def _given(self) -> dict[int, bytes]:
        """Return what the program has set, by env id, for processes that start."""
        attributes, options = self._overrides.attributes, self._overrides.reset_options
        if not attributes and not any(setting is not None for setting in options):
            return {}
        settings: list[Given] = [
            ({name: values[env_id] for name, values in attributes.items()}, options[env_id])
            for env_id in range(self.env_num)
        ]
        return {
            env_id: _pickled(setting, "what was set") for env_id, setting in enumerate(settings)
        }

    def _env_states(self) -> list[dict[str, Any] | None]:
        states = self._ask(b"g", dict.fromkeys(range(self.env_num)), "get_state")
        return [states[env_id] for env_id in range(self.env_num)]

    def _set_env_states(self, states: Sequence[Any]) -> None:
        for error in self._ask(b"l", dict(enumerate(states)), "set_state").values():
            if error is not None:
                raise error
        self._send_seeds([None] * self.env_num)

    def _probe_spaces(self) -> tuple[spaces.Space[Any], spaces.Space[Any]]:
        return probe_spaces(self._env_fns[0])


def _envs_of(failures: Iterable[ProcessFailure]) -> set[int]:
    return {env_id for failure in failures for env_id in failure.env_ids}


def _pickled(value: Any, what: str) -> bytes:
    try:
        return bytes(cloudpickle.dumps(value))
    except Exception as error:
        raise ConfigError(
            f"{what} cannot be sent to the processes of the envs ({type(error).__name__}: "
            f"{error}): {value!r:.200}; give plain data, create the object inside the env, or use "
            "mode='sync'"
        ) from error
