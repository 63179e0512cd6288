"""The process that runs envs of an :class:`~dmiddleware.env.AsyncEnvManager`.

The manager starts a new interpreter (not a fork, which would copy the threads and sockets of its
process) and talks to it over a socket pair; observations, actions and rewards are in shared memory.
A message is one byte for its kind, followed by pickled content. Pickle is safe here: both ends
belong to one program, and other processes cannot connect to a socket pair.

========  ============================================  ======================================
request   content                                       answers
========  ============================================  ======================================
``i``     :class:`Setup`                                ``k`` the spaces of each env
``m``     nothing; the memory's file follows            ``k``
``r``     {env id: (seed or None, pickled               ``k`` the infos of the resets
          :class:`Given` or None)}
``s``     the env ids, or nothing for all               ``r`` when resets begin; ``k``
                                                        :class:`StepInfos`, or nothing
``p``     {env id: whether of its last episode's end}   ``k`` the images, or why there are none
``f``     {env id: whether to keep images of ends}      ``k``
``g``     {env id: None}                                ``k`` the states
``l``     {env id: state}                               ``k`` the mismatches, or None
``d``     {env id: (seed or None, seed of all resets)}  ``k``
``a``     {env id: pickled :class:`Access`}             ``k`` the pickled results, or errors
``o``     {env id: pickled options of resets}           ``k``
``c``     nothing                                       none; the process exits
========  ============================================  ======================================

Any request except ``c`` may be answered by ``e`` and a :class:`Failure`. What a program gives
to its envs is pickled by itself, with cloudpickle.
"""

from __future__ import annotations

import faulthandler
import os
import pickle
import signal
import socket
import threading
import traceback
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import cloudpickle
import gymnasium as gym

from dmiddleware.code_mistakes import ErrorSummary
from dmiddleware.env.batching import NestedArrays, make_read, make_write, own_copy
from dmiddleware.env.contract import (
    MISFITS,
    bad_obs,
    check_env,
    check_first,
    check_result,
    close_quietly,
    contract_break,
)
from dmiddleware.env.env_access import Access
from dmiddleware.env.env_claims import EnvClaims
from dmiddleware.env.env_state import get_state, set_state
from dmiddleware.env.pictures import Picture, picture_of
from dmiddleware.env.subprocess.shared_arrays import SharedArrays
from dmiddleware.env.team import reward_shape_of
from dmiddleware.errors import CheckpointMismatch, EnvCallError, EnvProtocolError
from dmiddleware.process.garbage import kept_for_good
from dmiddleware.process.import_guard import refusing_at_import
from dmiddleware.process.pipes import MessagePipe, PipeClosed
from dmiddleware.process.terminal import needs_terminal

__all__ = ["main", "Given", "Setup", "Failure", "StepInfos"]

Given: TypeAlias = tuple[Mapping[str, Any], Mapping[str, Any] | None]
"""What a program has set on one env: its attributes, and the options of its resets."""


@dataclass(frozen=True)
class Setup:
    """The content of a worker's first request.

    Attributes:
        env_fns: the factory of each env, by env id.
        env_num: the number of envs of the manager, in all workers.
    """

    env_fns: dict[int, Callable[[], gym.Env[Any, Any]]]
    env_num: int


@dataclass(frozen=True)
class Failure:
    """An exception that an env raised.

    Attributes:
        env_id: the env.
        doing: the request ("step", "reset", "start").
        summary: the exception's type and message.
        details: its traceback.
        error: the exception, as far as other processes know its class.
        breaks_protocol: whether the env returned something that violates Gymnasium's interface.
    """

    env_id: int
    doing: str
    summary: str
    details: str
    error: ErrorSummary
    breaks_protocol: bool = False


@dataclass
class StepInfos:
    """The infos of a step; empty infos are left out.

    Attributes:
        last: the infos that the steps returned.
        first: the infos of the resets after the end of an episode.
    """

    last: dict[int, Any] = field(default_factory=dict)
    first: dict[int, Any] = field(default_factory=dict)


class _Worker:
    def __init__(self, pipe: MessagePipe) -> None:
        self._pipe = pipe
        self._envs: dict[int, gym.Env[Any, Any]] = {}
        self._claims = EnvClaims()
        self._seeds: dict[int, int] = {}
        self._fixed_seeds: dict[int, int | None] = {}
        self._options: dict[int, Mapping[str, Any] | None] = {}
        self._filmed: set[int] = set()
        self._last_pictures: dict[int, Picture] = {}
        self._env_num = 0
        self._env_id = 0
        self._doing = "start"
        self._requests: dict[bytes, Callable[[Any], Any]] = {
            b"i": self._set_up,
            b"m": self._map_memory,
            b"r": self._reset_envs,
            b"s": self._step_envs,
            b"p": self._render,
            b"f": self._film,
            b"g": self._get_states,
            b"l": self._set_states,
            b"d": self._seed,
            b"a": self._access,
            b"o": self._take_options,
        }

    def serve(self) -> None:
        """Answer requests until the manager closes the worker or its own end of the pipe."""
        while True:
            message = self._pipe.receive()
            kind, content = message[:1], message[1:]
            if kind == b"c":
                return
            try:
                with kept_for_good() if kind == b"i" else nullcontext():
                    answer = self._requests[kind](pickle.loads(content) if content else None)
                # cloudpickle: the class of a space or an info may be defined in the main module.
                self._pipe.send(b"k" + (b"" if answer is None else cloudpickle.dumps(answer)))
            except PipeClosed:
                raise
            except Exception as error:  # noqa: BLE001 - an env may raise anything
                self._pipe.send(b"e" + pickle.dumps(self._failure(error)))

    def close(self) -> None:
        """Close the envs."""
        for env in self._envs.values():
            close_quietly(env)

    def _failure(self, error: Exception) -> Failure:
        error = contract_break(f"env {self._env_id}", self._doing, error) or error
        return Failure(
            env_id=self._env_id,
            doing=self._doing,
            summary=_summarize(error),
            details=traceback.format_exc(),
            error=ErrorSummary.of(error),
            breaks_protocol=isinstance(error, EnvProtocolError),
        )

    def _set_up(self, setup: Setup) -> list[tuple[gym.Space[Any], gym.Space[Any]]]:
        self._doing, self._env_num = "start", setup.env_num
        for env_id, env_fn in setup.env_fns.items():
            self._env_id = env_id
            self._envs[env_id] = env_fn()
            check_env(self._envs[env_id], env_id)
            self._claims.claim(env_id, self._envs[env_id])
        pairs = [(env.observation_space, env.action_space) for env in self._envs.values()]
        self._obs_space, self._action_space = pairs[0]
        self._reward_shape = reward_shape_of(self._obs_space)
        self._write_array = make_write(self._obs_space)
        self._read = make_read(self._action_space)
        return pairs

    def _map_memory(self, _: None) -> None:
        self._shared = SharedArrays(
            self._obs_space, self._action_space, self._env_num, fd=self._pipe.receive_fd()
        )
        self._shared.close()

    def _reset_envs(self, begun: Mapping[int, tuple[int | None, bytes | None]]) -> dict[int, Any]:
        for env_id, (seed, env_options) in begun.items():
            if seed is not None:
                self._seeds[env_id] = seed
            if env_options is not None:
                self._take(env_id, env_options)
        return {env_id: self._reset(env_id) for env_id in begun}

    def _take(self, env_id: int, given: bytes) -> None:
        """Set on a new env what the program has set on the one before."""
        self._doing, self._env_id = "set_attr", env_id
        attributes, self._options[env_id] = pickle.loads(given)
        for name, value in attributes.items():
            Access("set_attr", name, (value,)).of(self._envs[env_id], env_id)

    def _reset(self, env_id: int) -> Any:
        self._doing, self._env_id = "reset", env_id
        env, seed = self._envs[env_id], self._seeds.pop(env_id, self._fixed_seeds.get(env_id))
        options = self._options.get(env_id)
        if options is not None:
            result = env.reset(seed=seed, options={**options})
        else:
            result = env.reset() if seed is None else env.reset(seed=seed)
        check_first(result, env_id)
        obs, info = result
        if seed is not None:
            env.action_space.seed(seed)
        self._write(self._shared.first_obs, env_id, obs)
        return info

    def _write(self, arrays: NestedArrays, env_id: int, obs: Any) -> None:
        try:
            self._write_array(arrays, env_id, obs)
        except MISFITS as error:
            raise bad_obs(env_id, obs, self._obs_space, error) from error

    def _step_envs(self, env_ids: list[int] | None) -> StepInfos | None:
        shared, ended, infos = self._shared, [], StepInfos()
        for env_id in self._envs if env_ids is None else env_ids:
            self._doing, self._env_id = "step", env_id
            result = self._envs[env_id].step(self._read(shared.action, env_id))
            check_result(result, env_id, self._reward_shape)
            obs, shared.reward[env_id], terminated, truncated, info = result
            self._write(shared.next_obs, env_id, obs)
            shared.terminated[env_id], shared.truncated[env_id] = terminated, truncated
            is_end = terminated or truncated
            if is_end:
                ended.append(env_id)
                if env_id in self._filmed:
                    self._last_pictures[env_id] = own_copy(picture_of(self._envs[env_id]))
            if info:
                # The reset may fill it again.
                infos.last[env_id] = own_copy(info) if is_end else info
        if ended:
            # From here on, the deadline is that of resets.
            self._pipe.send(b"r")
            infos.first = {env_id: info for env_id in ended if (info := self._reset(env_id))}
        return infos if infos.last or infos.first else None

    def _render(self, asked: Mapping[int, bool]) -> dict[int, Picture]:
        self._doing = "render"
        return {
            env_id: self._last_pictures.pop(env_id) if is_last else picture_of(self._envs[env_id])
            for env_id, is_last in asked.items()
            if not is_last or env_id in self._last_pictures
        }

    def _film(self, chosen: Mapping[int, bool]) -> dict[int, None]:
        self._filmed -= chosen.keys()
        self._filmed |= {env_id for env_id, is_filmed in chosen.items() if is_filmed}
        return {}

    def _access(self, accesses: Mapping[int, bytes]) -> dict[int, bytes | EnvCallError]:
        return {env_id: self._accessed(env_id, access) for env_id, access in accesses.items()}

    def _accessed(self, env_id: int, access: bytes) -> bytes | EnvCallError:
        """Return the pickled result; an error is a result too, since the env can still be used."""
        try:
            return _pickled(pickle.loads(access), self._envs[env_id], env_id)
        except Exception as error:  # noqa: BLE001 - an env may raise anything
            return EnvCallError(f"{error}\n{traceback.format_exc()}")

    def _take_options(self, options: Mapping[int, bytes]) -> None:
        self._doing = "set_reset_options"
        self._options |= {env_id: pickle.loads(pickled) for env_id, pickled in options.items()}

    def _get_states(self, env_ids: Mapping[int, None]) -> dict[int, Any]:
        self._doing = "get_state"
        return {env_id: get_state(self._envs[env_id]) for env_id in env_ids}

    def _set_states(self, states: Mapping[int, Any]) -> dict[int, CheckpointMismatch | None]:
        self._doing = "set_state"
        self._seeds.clear()
        return {env_id: self._set_state(env_id, state) for env_id, state in states.items()}

    def _set_state(self, env_id: int, state: Any) -> CheckpointMismatch | None:
        self._env_id = env_id
        try:
            set_state(self._envs[env_id], state)
        except CheckpointMismatch as error:
            return error
        return None

    def _seed(self, seeds: Mapping[int, tuple[int | None, int | None]]) -> None:
        self._seeds = {env_id: once for env_id, (once, _) in seeds.items() if once is not None}
        self._fixed_seeds = {env_id: always for env_id, (_, always) in seeds.items()}


def _pickled(access: Access, env: gym.Env[Any, Any], env_id: int) -> bytes:
    result = access.of(env, env_id)
    try:
        return bytes(cloudpickle.dumps(result))
    except Exception as error:
        raise EnvCallError(
            f"env {env_id} returned {result!r:.100} in {access}, which cannot be sent from its "
            f"process ({type(error).__name__}: {error}); ask for plain data, or use mode='sync'"
        ) from error


def _summarize(error: Exception) -> str:
    hint = (
        "processes of envs have no terminal, so breakpoint(), pdb and input() cannot be used in "
        'them; use mode="sync" to debug an env'
    )
    return f"{type(error).__name__}: {hint if needs_terminal(error) else error}"


def main(socket_fd: int, traceback_fd: int) -> None:
    """Run a worker: the entry point of its process.

    Args:
        socket_fd: one end of a stream socket; the manager has the other.
        traceback_fd: a pipe for the traceback that is written when the interpreter dies, or when
            the manager sends SIGUSR1 to find out where the env hangs.
    """
    faulthandler.enable(traceback_fd)
    if hasattr(faulthandler, "register"):
        faulthandler.register(signal.SIGUSR1, file=traceback_fd)
    pipe = MessagePipe(socket.socket(fileno=socket_fd))
    threading.Thread(target=_die_with_manager, args=(pipe,), daemon=True).start()
    worker = _Worker(pipe)
    try:
        # Unpickled functions may belong to a module that starts a training when it is imported.
        with refusing_at_import("runs a task", "starts processes of envs"):
            worker.serve()
        worker.close()
    except PipeClosed:
        worker.close()


def _die_with_manager(pipe: MessagePipe) -> None:
    """Kill the process and those that its envs started once the manager has died.

    This runs in a thread, because the main thread may hang in an env.
    """
    pipe.wait_until_closed()
    os.killpg(os.getpid(), signal.SIGKILL)
