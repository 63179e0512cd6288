"""Making env managers from the id of an env."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Literal, TypeAlias

import gymnasium as gym
from gymnasium.envs.registration import EnvSpec

from dmiddleware.env.async_manager import AsyncEnvManager
from dmiddleware.env.contract import what_instead
from dmiddleware.env.envpool_manager import EnvPoolManager
from dmiddleware.env.manager import BaseEnvManager
from dmiddleware.env.pettingzoo import ParallelEnvAdapter, is_parallel_env
from dmiddleware.env.sync_manager import EnvFn, SyncEnvManager
from dmiddleware.env.vector_manager import VectorEnvManager
from dmiddleware.errors import ConfigError, RegistryError
from dmiddleware.foreign_names import checks_options
from dmiddleware.registry import nearest
from dmiddleware.settings import Count, checked

__all__ = ["make_env_manager"]

Wrapper: TypeAlias = Callable[[Any], Any]
Maker: TypeAlias = EnvSpec | Callable[..., Any]

# How ids and entry points of optional envs begin, the module that they need, and its extra.
_OPTIONAL: Final = (
    ("ALE/", "ale_py", "atari"),
    ("MiniGrid-", "minigrid", "minigrid"),
    ("BabyAI-", "minigrid", "minigrid"),
    ("gymnasium_robotics:", "gymnasium_robotics", "robotics"),
    ("gymnasium.envs.mujoco.", "mujoco", "mujoco"),
    ("gymnasium.envs.box2d.", "Box2D", "box2d"),
)


@checks_options
def make_env_manager(
    env: str | EnvFn,
    *,
    env_num: int,
    mode: Literal["sync", "async", "vector"] = "sync",
    backend: Literal["gymnasium", "envpool"] = "gymnasium",
    env_kwargs: Mapping[str, Any] | None = None,
    wrappers: Sequence[Wrapper] = (),
    seed: int | Sequence[int] | None = None,
    max_retry: int = 3,
    step_timeout_s: float = 60.0,
    reset_timeout_s: float = 60.0,
    envs_per_process: int = 1,
) -> BaseEnvManager:
    """Create an env manager; a ``with`` block or ``launch()`` launches it.

    Args:
        env: an id registered with Gymnasium ("CartPole-v1", "module:Env-v0"), or a function that
            makes an env, called once per env; with "vector" it makes the vector env, called once.
            A PettingZoo parallel env becomes an env of several agents, see
            :class:`~dmiddleware.env.ParallelEnvAdapter`.
            Modules of the optional extras are imported by their ids ("ALE/Pong-v5",
            "MiniGrid-Empty-5x5-v0"; "gymnasium_robotics:FetchReach-v4" names its own).
        env_num: the number of envs.
        mode: "sync" steps the envs one after another in this process, best for envs that take
            microseconds; "async" steps them in separate processes, for envs that take milliseconds,
            crash or hang; "vector" uses the env's own vectorized implementation.
        backend: "envpool" steps the envs in the threads of EnvPool instead, see
            :class:`~dmiddleware.env.EnvPoolManager`; ``env`` is one of its ids, and of the other
            options only ``env_num``, ``env_kwargs`` and ``seed`` can be given.
        env_kwargs: keyword arguments for the env.
        wrappers: applied to each env, the first one innermost; with "vector" to the vector env.
        seed: an integer, from which the seed of each env is derived, or one seed per env; None
            leaves the envs unseeded.
        max_retry: how often one env may be restarted in a row.
        step_timeout_s: how long a step may take ("async").
        reset_timeout_s: how long making and resetting an env may take ("async").
        envs_per_process: how many envs share a process ("async").

    Raises:
        ConfigError: if an argument has the wrong type or an invalid value, or the env has no
            vectorized implementation ("vector"), or needs an extra that is not installed.
        RegistryError: if no env is registered under the id; the message lists the nearest ones.
    """
    if backend not in ("gymnasium", "envpool"):
        raise ConfigError(f"backend must be 'gymnasium' or 'envpool', got {backend!r}")
    if mode not in ("sync", "async", "vector"):
        raise ConfigError(f"mode must be 'sync', 'async' or 'vector', got {mode!r}")
    if env_kwargs is not None and not isinstance(env_kwargs, Mapping):
        raise ConfigError(f"env_kwargs must be a dictionary of arguments, got {env_kwargs!r}")
    _check_wrappers(wrappers)
    if backend == "envpool":
        if not isinstance(env, str) or mode != "sync" or wrappers:
            raise ConfigError(
                "backend='envpool' takes the id of an env and neither mode nor wrappers, because "
                "EnvPool steps its envs in C++; use its own options, in env_kwargs"
            )
        return EnvPoolManager(env, env_num, seed=seed, env_kwargs=env_kwargs)
    maker, kwargs, layers = _checked_env(env), dict(env_kwargs or {}), tuple(wrappers)
    if mode == "vector":
        return VectorEnvManager(
            functools.partial(_make_vector_env, _vector_maker(maker, env_num), kwargs, layers),
            env_num,
            seed=seed,
            max_retry=max_retry,
        )
    env_fns = _repeat(functools.partial(_make_env, maker, kwargs, layers), env_num)
    if mode == "sync":
        return SyncEnvManager(env_fns, seed=seed, max_retry=max_retry)
    return AsyncEnvManager(
        env_fns,
        seed=seed,
        max_retry=max_retry,
        step_timeout_s=step_timeout_s,
        reset_timeout_s=reset_timeout_s,
        envs_per_process=envs_per_process,
    )


def _check_wrappers(wrappers: object) -> None:
    if not isinstance(wrappers, list | tuple):
        raise ConfigError(f"wrappers must be a list of wrappers, got {wrappers!r}")
    for index, wrapper in enumerate(wrappers):
        if not callable(wrapper):
            raise ConfigError(
                f"wrappers[{index}] must take an env and return one, got {wrapper!r:.100}"
            )


def _repeat(env_fn: EnvFn, env_num: int) -> list[EnvFn]:
    return [env_fn] * checked("env_num", env_num, Count)


def _make_env(maker: Maker, kwargs: dict[str, Any], wrappers: tuple[Wrapper, ...]) -> Any:
    made = gym.make(maker, **kwargs) if isinstance(maker, EnvSpec) else maker(**kwargs)
    for wrapper in wrappers:
        made = wrapper(made)
    return ParallelEnvAdapter(made) if is_parallel_env(made) else made


def _make_vector_env(
    maker: Callable[..., Any], kwargs: dict[str, Any], wrappers: tuple[Wrapper, ...]
) -> Any:
    made = maker(**kwargs)
    for wrapper in wrappers:
        made = wrapper(made)
    return made


def _vector_maker(maker: Maker, env_num: int) -> Callable[..., Any]:
    if not isinstance(maker, EnvSpec):
        return maker
    if maker.vector_entry_point is None:
        raise ConfigError(
            f"{maker.id} has no vectorized implementation; use mode='sync' or mode='async'"
        )
    return functools.partial(
        gym.make_vec, maker, num_envs=env_num, vectorization_mode="vector_entry_point"
    )


def _checked_env(env: Any) -> Maker:
    """Return the factory, or the spec of the id, which another process may not know."""
    if not isinstance(env, str):
        if not callable(env):
            instead = "" if env is None else what_instead(env)
            if not instead and isinstance(env, gym.Env):
                name = type(env.unwrapped).__name__
                instead = f"an env already; pass a function that makes a new one: lambda: {name}()"
            raise ConfigError(
                f"env must be the id of an env or a function that makes one, got {env!r:.100}"
                + (f", which is {instead}" if instead else "")
            )
        maker: Callable[..., Any] = env
        return maker
    module, colon, name = env.rpartition(":")
    _check_installed(env)
    try:
        if colon:
            _import(module)
        spec = gym.spec(name)
    except (gym.error.Error, ModuleNotFoundError, ValueError) as error:
        near = nearest(name, gym.registry)
        hint = f"; nearest known: {', '.join(near)}" if near else ""
        raise RegistryError(f"no env is registered as {env!r}{hint}. {error}") from error
    _check_installed(str(spec.entry_point))
    return spec


def _check_installed(name: str) -> None:
    """Import the module that registers an optional env, or tell how to install it."""
    for beginning, module, extra in _OPTIONAL:
        if name.startswith(beginning):
            if importlib.util.find_spec(module) is None:
                raise ConfigError(
                    f"{name} needs the package {module}; run: pip install 'dmiddleware[{extra}]'"
                )
            _import(module)


def _import(module: str) -> None:
    with warnings.catch_warnings():
        # Some packages warn when they are imported; where that is an error, Box2D crashes.
        warnings.filterwarnings("ignore", category=UserWarning)
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        importlib.import_module(module)
