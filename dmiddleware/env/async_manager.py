"""Envs that are stepped at the same time, in processes of their own."""

from __future__ import annotations

import contextlib
import pickle
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import cloudpickle
import numpy as np
import numpy.typing as npt
from gymnasium import spaces

from dmiddleware.env.base import BaseEnvManager
from dmiddleware.env.channel import deadline_in
from dmiddleware.env.failures import FailureBudget
from dmiddleware.env.process import EnvProcess, ProcessFailure
from dmiddleware.env.protocol import as_frame, check_same_spaces
from dmiddleware.env.shared import SharedArrays
from dmiddleware.env.spaces import NestedArrays, copy_arrays, make_write, replace_rows, take_rows
from dmiddleware.env.sync_manager import EnvFn, probe_spaces
from dmiddleware.env.timestep import BatchedTimestep
from dmiddleware.env.worker import Setup, StepInfos
from dmiddleware.errors import ConfigError, EnvTimeout, StructureError
from dmiddleware.seeding import derive_seed

__all__ = ["AsyncEnvManager"]


class AsyncEnvManager(BaseEnvManager):
    """Steps its envs at the same time, in processes of their own.

    For envs that take a millisecond or more a step, and for envs that crash or hang: an env that
    raises, whose process dies, or that does not answer in time, costs its process, which is started
    anew, while the others go on. Where an env hung or crashed is told in the log, as far as Python
    sees. Observations travel through shared memory. The processes are fresh interpreters, which do
    not import the program's main module; factories reach them by cloudpickle.

    Args:
        env_fns: one factory per env; all envs have the same spaces.
        seed: an integer or one seed per env, see :meth:`seed`.
        max_retry: restarts in a row that one env is allowed before
            :class:`~dmiddleware.errors.EnvCrashed` or :class:`~dmiddleware.errors.EnvTimeout` is
            raised; an episode that the env ends by itself sets the count back.
        step_timeout_s: how long a step of one env may take.
        reset_timeout_s: how long a reset of one env may take, and starting its process.
        close_timeout_s: how long closing the envs may take before their processes are killed.
        envs_per_process: how many envs share a process. They share its fate, too: when one fails,
            the episodes of all are lost.
    """

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
        super().__init__(len(env_fns), seed=seed)
        for name, value in (
            ("step_timeout_s", step_timeout_s),
            ("reset_timeout_s", reset_timeout_s),
            ("close_timeout_s", close_timeout_s),
            ("envs_per_process", envs_per_process),
        ):
            if not value > 0:
                raise ConfigError(f"{name} is positive, got {value!r}")
        self._env_fns = list(env_fns)
        self._max_retry = max_retry
        self._step_timeout_s = step_timeout_s
        self._reset_timeout_s = reset_timeout_s
        self._close_timeout_s = close_timeout_s
        self._envs_per_process = envs_per_process
        self._failures = FailureBudget(self._env_num, max_retry=max_retry)
        self._processes: list[EnvProcess] = []
        self._shared: SharedArrays | None = None
        self._cut: set[int] = set()

    @property
    def restarts(self) -> int:
        """How often an env failed and was restarted since launch."""
        return self._failures.restarts

    @property
    def pids(self) -> tuple[int, ...]:
        """The ids of the processes of the envs."""
        return tuple(process.pid for process in self._processes)

    def launch(self) -> None:
        """Start the processes and reset the envs, see :meth:`BaseEnvManager.launch`."""
        self._require_closed()
        self._begin()
        self._failures = FailureBudget(self._env_num, max_retry=self._max_retry)
        self._cut = set()
        ids = list(range(self._env_num))
        groups = [
            ids[begin : begin + self._envs_per_process]
            for begin in range(0, self._env_num, self._envs_per_process)
        ]
        try:
            setups = [self._setup_of(group) for group in groups]
            for group in groups:
                self._processes.append(EnvProcess(group))
            infos, failures = self._start(dict(enumerate(setups)))
            for failure in failures.values():
                raise failure.final("and nothing is tried again while envs are launched")
            self._open = True
            first_obs = copy_arrays(self._memory.first_obs)
            self._install_reset(ids, first_obs, [infos[env_id] for env_id in ids])
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the envs and end their processes; a second call does nothing."""
        self._open = False
        processes, self._processes = self._processes, []
        for process in processes:
            process.request(b"c", timeout_s=0.1)
        deadline = deadline_in(self._close_timeout_s)
        for process in processes:
            process.close(deadline=deadline)
        if self._shared is not None:
            self._shared.close()
            self._shared = None

    def reset(self, env_ids: Iterable[int] | None = None) -> None:
        """Begin a new episode in some envs, see :meth:`BaseEnvManager.reset`."""
        self._require_open("reset")
        ids = self._checked_ids(env_ids)
        requests = {
            index: (b"r", pickle.dumps(dict.fromkeys(own)))
            for index, own in self._by_process(ids).items()
        }
        with self._closing_on_error():
            answers, failures = self._exchange(requests, "reset", self._reset_timeout_s)
            infos = _merged(answers)
            lost = self._envs_of(failures)
            infos |= self._restart(failures)
            # Who shared the process of an env that failed has lost an episode, too.
            self._cut |= lost.difference(ids)
            self._dropped_steps += sum(map(self._totals.length_of, lost.difference(ids)))
            begun = sorted(lost.union(ids))
            first_obs = take_rows(self._memory.first_obs, begun)
            self._install_reset(begun, first_obs, [infos[env_id] for env_id in begun])

    def step(self, actions: NestedArrays | Mapping[int, Any]) -> BatchedTimestep:
        """Step the envs, and reset those whose episode ended, see :meth:`BaseEnvManager.step`."""
        self._require_open("step")
        ids, rows = self._assign(actions)
        with self._closing_on_error():
            for row, action in enumerate(rows):
                env_id = row if ids is None else ids[row]
                self._write_action(self._memory.action, env_id, action)
            if ids is None:
                requests = dict.fromkeys(range(len(self._processes)), (b"s", b""))
            else:
                requests = {
                    index: (b"s", pickle.dumps(own)) for index, own in self._by_process(ids).items()
                }
            answers, failures = self._exchange(requests, "step", self._step_timeout_s)
            lost, first_infos = self._recover(failures, ids, rows)
            if ids is not None and lost.difference(ids):
                ids = ids + sorted(lost.difference(ids))
            return self._assemble(ids, answers, lost, first_infos)

    def render(self, env_ids: Iterable[int] | None = None) -> list[npt.NDArray[np.uint8]]:
        """Return a picture of each env, see :meth:`BaseEnvManager.render`."""
        self._require_open("render")
        ids = self._checked_ids(env_ids)
        groups = self._by_process(ids)
        answers = self._ask(
            {index: (b"p", pickle.dumps(own)) for index, own in groups.items()}, "render"
        )
        frames = {
            env_id: as_frame(*picture)
            for index, own in groups.items()
            for env_id, picture in zip(own, answers[index], strict=True)
        }
        return [frames[env_id] for env_id in ids]

    # Results

    def _assemble(
        self,
        ids: list[int] | None,
        answers: Mapping[int, StepInfos | None],
        lost: set[int],
        first_infos: dict[int, Any],
    ) -> BatchedTimestep:
        """Copy a step's results out of the shared memory.

        Args:
            ids: the envs of the rows; None: all.
            answers: the infos, by process.
            lost: the envs that were restarted.
            first_infos: the infos of their resets.
        """
        memory, index = self._memory, slice(None) if ids is None else ids
        env_ids = self._id_array(ids).tolist()
        next_obs = copy_arrays(memory.next_obs) if ids is None else take_rows(memory.next_obs, ids)
        reward = memory.reward[index].copy()
        terminated, truncated = memory.terminated[index].copy(), memory.truncated[index].copy()
        done = terminated | truncated
        last_infos: dict[int, Any] = dict(first_infos)
        for answer in answers.values():
            if answer is not None:
                last_infos |= answer.last
                first_infos |= answer.first
        failed = None
        if lost or self._cut:
            failed = [row for row, env_id in enumerate(env_ids) if env_id in lost | self._cut]
            renewed = [row for row in failed if done[row] or env_ids[row] in lost]
            next_obs = self._with_first_obs(next_obs, renewed, env_ids)
            for array in (reward, terminated, truncated, done):
                array[failed] = 0
            for row in failed:
                last_infos[env_ids[row]] = {**last_infos.get(env_ids[row], {}), "abnormal": True}
            self._cut.difference_update(env_ids)
        self._totals.add(ids, reward)
        self._replace_infos(env_ids, [last_infos.get(env_id, {}) for env_id in env_ids])
        obs = next_obs
        if done.any():
            ended = done.nonzero()[0].tolist()
            obs = self._with_first_obs(next_obs, ended, env_ids)
            for env_id in (env_ids[row] for row in ended):
                last_infos[env_id] = {**self._totals.end(env_id), **last_infos.get(env_id, {})}
                self._failures.record_episode(env_id)
        self._replace_infos(first_infos, first_infos.values())
        infos = [last_infos.get(env_id, {}) for env_id in env_ids]
        return self._finish(ids, obs, next_obs, reward, done, terminated, truncated, infos, failed)

    def _with_first_obs(
        self, obs: NestedArrays, rows: list[int], env_ids: list[int]
    ) -> NestedArrays:
        """Return a copy of ``obs`` with the first observations of new episodes in some rows."""
        if not rows:
            return obs
        fresh = take_rows(self._memory.first_obs, [env_ids[row] for row in rows])
        return replace_rows(obs, rows, fresh)

    # Processes

    @property
    def _memory(self) -> SharedArrays:
        assert self._shared is not None
        return self._shared

    def _setup_of(self, env_ids: list[int]) -> bytes:
        setup = Setup({env_id: self._env_fns[env_id] for env_id in env_ids}, self._env_num)
        try:
            return bytes(cloudpickle.dumps(setup))
        except Exception as error:
            raise ConfigError(
                f"the factory of env {env_ids[0]} cannot be sent to a process: "
                f"{type(error).__name__}: {error}; let it make what it needs inside, or use "
                'mode="sync"'
            ) from error

    def _by_process(self, env_ids: Iterable[int]) -> dict[int, list[int]]:
        groups: dict[int, list[int]] = {}
        for env_id in env_ids:
            groups.setdefault(env_id // self._envs_per_process, []).append(env_id)
        return groups

    def _envs_of(self, indices: Iterable[int]) -> set[int]:
        return {env_id for index in indices for env_id in self._processes[index].env_ids}

    def _exchange(
        self, requests: Mapping[int, tuple[bytes, bytes]], doing: str, timeout_s: float
    ) -> tuple[dict[int, Any], dict[int, ProcessFailure]]:
        """Ask some processes at the same time; the deadline is per env.

        Returns:
            The answers, and the failures of those that gave none, by the processes' indices.
        """
        for index, (kind, content) in requests.items():
            n_envs = len(self._processes[index].env_ids)
            self._processes[index].request(kind, content, timeout_s=timeout_s * n_envs)
        return self._answers(requests, doing, timeout_s)

    def _answers(
        self, indices: Iterable[int], doing: str, timeout_s: float
    ) -> tuple[dict[int, Any], dict[int, ProcessFailure]]:
        answers: dict[int, Any] = {}
        failures: dict[int, ProcessFailure] = {}
        begun = time.monotonic()
        for index in indices:
            process = self._processes[index]
            n_envs = len(process.env_ids)
            try:
                answers[index] = process.answer(
                    doing,
                    deadline=begun + timeout_s * n_envs,
                    reset_timeout_s=self._reset_timeout_s * n_envs,
                )
            except ProcessFailure as failure:
                failures[index] = failure
                if isinstance(failure.error, EnvTimeout):
                    # It would not take a request to close, either.
                    process.kill()
        return answers, failures

    def _ask(self, requests: Mapping[int, tuple[bytes, bytes]], doing: str) -> dict[int, Any]:
        """Ask where a failure is not survived: what was asked would be lost."""
        with self._closing_on_error():
            answers, failures = self._exchange(requests, doing, self._reset_timeout_s)
            for failure in failures.values():
                raise failure.final("and what was asked cannot be asked again")
            return answers

    def _start(
        self, setups: Mapping[int, bytes]
    ) -> tuple[dict[int, Any], dict[int, ProcessFailure]]:
        """Make and reset the envs of processes that were just started.

        Returns:
            The infos of the resets by env id, and the failures by the processes' indices.
        """
        timeout_s = self._reset_timeout_s
        requests = {index: (b"i", setup) for index, setup in setups.items()}
        found, failures = self._exchange(requests, "start", timeout_s)
        self._take_spaces([pair for index in sorted(found) for pair in found[index]])
        for index in found:
            self._processes[index].request(b"m", timeout_s=timeout_s)
            self._processes[index].send_fd(self._memory.fileno(), timeout_s=timeout_s)
        mapped, more = self._answers(found, "start", timeout_s)
        failures |= more
        seeds = {
            index: {key: self._pending_seeds.pop(key, None) for key in process.env_ids}
            for index, process in enumerate(self._processes)
            if index in mapped
        }
        requests = {index: (b"r", pickle.dumps(own)) for index, own in seeds.items()}
        infos, more = self._exchange(requests, "reset", timeout_s)
        return _merged(infos), failures | more

    def _take_spaces(self, found: list[tuple[spaces.Space[Any], spaces.Space[Any]]]) -> None:
        """Make the memory when the spaces become known, and refuse envs that differ in them."""
        if not found:
            return
        if self._shared is None:
            check_same_spaces(found)
            self._set_spaces(*found[0])
            self._write_action = make_write(found[0][1])
            self._shared = SharedArrays(*found[0], self._env_num)
        else:
            check_same_spaces([(self.observation_space, self.action_space), *found])

    def _recover(
        self, failures: dict[int, ProcessFailure], ids: list[int] | None, rows: list[Any]
    ) -> tuple[set[int], dict[int, Any]]:
        """Restart the processes that failed in a step.

        Returns:
            The envs whose episodes are lost, and the infos of their resets.
        """
        if not failures:
            return set(), {}
        for failure in failures.values():
            env_ids = self._id_array(ids).tolist()
            if failure.doing == "step" and failure.env_id in env_ids:
                self._refuse_bad_action(failure, rows[env_ids.index(failure.env_id)])
        lost = self._envs_of(failures)
        self._dropped_steps += sum(map(self._totals.length_of, lost))
        return lost, self._restart(failures)

    def _refuse_bad_action(self, failure: ProcessFailure, action: Any) -> None:
        """Blame an action that is not in the action space, rather than the env."""
        if not self.action_space.contains(action):
            raise StructureError(
                f"env {failure.env_id} was given the action {action!r}, which is not in its "
                f"action space {self.action_space}, and {failure.error}\n{failure.details}"
            )

    def _restart(self, failures: dict[int, ProcessFailure]) -> dict[int, Any]:
        """Put new processes in the place of those that failed, until all their envs are reset.

        Returns:
            The infos of the resets, by env id.
        """
        infos: dict[int, Any] = {}
        while failures:
            setups = {}
            for index, failure in failures.items():
                if failure.is_final:
                    raise failure.final("and would fail again")
                self._failures.record_failure(
                    failure.env_id, failure.doing, failure.error, failure.details
                )
                env_ids = self._processes[index].env_ids
                self._processes[index].kill()
                self._reseed(env_ids, self._failures.restarts_of(failure.env_id))
                self._processes[index] = EnvProcess(env_ids)
                setups[index] = self._setup_of(env_ids)
            begun, failures = self._start(setups)
            infos |= begun
        return infos

    def _reseed(self, env_ids: Iterable[int], count: int) -> None:
        # Another seed than at the start, or the same failure would come again.
        if self._seeds is not None:
            for env_id in env_ids:
                seed = derive_seed(self._seeds[env_id], "restart", count)
                self._pending_seeds[env_id] = seed

    @contextlib.contextmanager
    def _closing_on_error(self) -> Iterator[None]:
        # Whatever cuts an exchange short, Ctrl-C too, leaves answers that no one waits for.
        try:
            yield
        except BaseException:
            self.close()
            raise

    def _seed_envs(self, seeds: list[int]) -> None:
        if not self._open:
            super()._seed_envs(seeds)
            return
        requests = {
            index: (b"d", pickle.dumps({key: seeds[key] for key in process.env_ids}))
            for index, process in enumerate(self._processes)
        }
        self._ask(requests, "seed")

    def _env_states(self) -> list[dict[str, Any] | None]:
        requests = dict.fromkeys(range(len(self._processes)), (b"g", b""))
        states = _merged(self._ask(requests, "get_state"))
        return [states[env_id] for env_id in range(self._env_num)]

    def _set_env_states(self, states: Sequence[Any]) -> None:
        requests = {
            index: (b"l", pickle.dumps({key: states[key] for key in process.env_ids}))
            for index, process in enumerate(self._processes)
        }
        self._ask(requests, "set_state")

    def _probe_spaces(self) -> tuple[spaces.Space[Any], spaces.Space[Any]]:
        return probe_spaces(self._env_fns[0])


def _merged(answers: Mapping[int, dict[int, Any]]) -> dict[int, Any]:
    return {env_id: info for infos in answers.values() for env_id, info in infos.items()}
