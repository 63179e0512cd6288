"""The face of ``ding.envs.env_manager``: the managers here, over envs by DI-engine's interface."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from easydict import EasyDict

from dmiddleware.ding.envs.adapter import AsGymnasium
from dmiddleware.ding.program import next_env_seed
from dmiddleware.env import AsyncEnvManager, SyncEnvManager
from dmiddleware.env import BaseEnvManager as CoreEnvManager
from dmiddleware.errors import ConfigError
from dmiddleware.worker.env_config import ENV_LIMITS

__all__ = [
    "AsyncSubprocessEnvManager",
    "BaseEnvManager",
    "BaseEnvManagerV2",
    "EnvSupervisor",
    "SubprocessEnvManagerV2",
    "SyncSubprocessEnvManager",
    "create_env_manager",
    "get_env_manager_cls",
    "setup_ding_env_manager",
]

REFUSED: Final = {
    "GymVectorEnvManager": "use make_env_manager(id, mode='vector') of dmiddleware.env",
    "PoolEnvManager": "use make_env_manager(id, mode='envpool') of dmiddleware.env",
}


def _manager(kind: type[Any], env_fn: Iterable[Callable[[], Any]], cfg: Any) -> Any:
    limits = {
        ENV_LIMITS[name]: value
        for name, value in dict(cfg or {}).items()
        if name in ENV_LIMITS and value is not None and (name == "max_retry" or kind is not _SYNC)
    }
    env_fns = [functools.partial(AsGymnasium, make_env) for make_env in env_fn]
    return kind(env_fns, seed=next_env_seed(), **limits)


_SYNC: Final = SyncEnvManager


class _Manager(type):
    """The type of the names that make a manager; managers are their instances."""

    kind: type[CoreEnvManager]
    instances: Any

    def __call__(cls, env_fn: Iterable[Callable[[], Any]], cfg: Any = None) -> Any:
        return _manager(cls.kind, env_fn, cfg)

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, cls.instances)


class BaseEnvManagerV2(metaclass=_Manager):
    """Steps envs one after the other in this process.

    Args:
        env_fn: a function for each env.
        cfg: ``max_retry`` and limits of time.
    """

    kind: type[CoreEnvManager] = SyncEnvManager
    instances: Any = CoreEnvManager

    @classmethod
    def default_config(cls) -> EasyDict:
        """Return an empty config."""
        return EasyDict()


class SubprocessEnvManagerV2(BaseEnvManagerV2):
    """Steps each env in a process of its own."""

    kind = AsyncEnvManager
    instances = AsyncEnvManager


BaseEnvManager = BaseEnvManagerV2
AsyncSubprocessEnvManager = SubprocessEnvManagerV2
SyncSubprocessEnvManager = SubprocessEnvManagerV2


def EnvSupervisor(  # noqa: N802 (DI-engine's name)
    type_: Any = None, env_fn: Iterable[Callable[[], Any]] = (), **cfg: Any
) -> Any:
    """Return a manager; ``ChildType.PROCESS`` steps the envs in processes, others here."""
    in_processes = getattr(type_, "name", str(type_)).lower() == "process"
    return _manager(AsyncEnvManager if in_processes else SyncEnvManager, env_fn, cfg)


_KINDS: Final[Mapping[str, Any]] = {
    "base": BaseEnvManagerV2,
    "subprocess": SubprocessEnvManagerV2,
    "async_subprocess": SubprocessEnvManagerV2,
    "env_supervisor": EnvSupervisor,
}


def get_env_manager_cls(cfg: Mapping[str, Any]) -> Any:
    """Return what makes the manager that ``cfg.type`` names.

    Raises:
        ConfigError: for an unknown type.
    """
    if cfg.get("type") not in _KINDS:
        raise ConfigError(f"env_manager.type must be one of {', '.join(_KINDS)}, got {cfg}")
    return _KINDS[cfg["type"]]


def create_env_manager(manager_cfg: Mapping[str, Any], env_fn: Iterable[Callable[[], Any]]) -> Any:
    """Make the manager that a config names, of envs that functions make."""
    make: Any = get_env_manager_cls(manager_cfg)
    return make(env_fn, manager_cfg)


def setup_ding_env_manager(
    env: Any, env_num: int, context: str | None = None, debug: bool = False, caller: str = ""
) -> Any:
    """Make a manager of copies of an env."""
    manager: Any = BaseEnvManagerV2 if debug else SubprocessEnvManagerV2
    return manager([functools.partial(env.clone, caller)] * env_num)
