"""What serial collectors and evaluators share: a policy, envs, and logs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from dmiddleware.config import Configurable
from dmiddleware.env import BaseEnvManager
from dmiddleware.errors import ConfigError
from dmiddleware.registry import Registry, import_modules
from dmiddleware.worker.logs import LazyWriter, table
from dmiddleware.worker.ranks import rank_and_world_size

__all__ = ["SerialWorker", "get_worker_cls"]

T = TypeVar("T")


class SerialWorker(Configurable):
    """A policy in envs, in this process, with a text log and a tensorboard writer.

    Args:
        cfg: what differs from ``default_config()``.
        env: an env manager; launched when it is first needed, if it is not yet.
        policy: a mode of a policy.
        tb_logger: a tensorboardX ``SummaryWriter``; None makes one in ``<exp_name>/log`` as soon as
            something is logged.
        exp_name: folder for the worker's output.
        instance_name: tells workers of one kind apart in logs.
    """

    def __init__(
        self,
        cfg: Mapping[str, Any] | None = None,
        env: BaseEnvManager | None = None,
        policy: Any = None,
        tb_logger: Any = None,
        exp_name: str = "default_experiment",
        instance_name: str = "worker",
    ) -> None:
        self._cfg = self.merged_config(cfg)
        self._env = env
        self._policy = policy
        self._exp_name = exp_name
        self._instance_name = instance_name
        self._rank, self._world_size = rank_and_world_size()
        self._logger = logging.getLogger(f"{type(self).__module__}.{instance_name}")
        self._writer = LazyWriter(tb_logger, Path(exp_name) / "log" / instance_name)

    @property
    def env(self) -> BaseEnvManager:
        """The env manager.

        Raises:
            ConfigError: if there is none.
        """
        if self._env is None:
            raise ConfigError(f"{self} has no envs; give it some with reset_env(env_manager)")
        return self._env

    @property
    def policy(self) -> Any:
        """The policy's mode.

        Raises:
            ConfigError: if there is none.
        """
        if self._policy is None:
            raise ConfigError(f"{self} has no policy; give it one with reset_policy(mode)")
        return self._policy

    @property
    def tb_logger(self) -> Any:
        """The tensorboard writer."""
        return self._writer.get()

    def close(self) -> None:
        """Close the envs, and the tensorboard writer if it is the worker's own."""
        if self._env is not None:
            self._env.close()
        self._writer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._instance_name!r})"

    def _show(
        self, title: str, values: Mapping[str, float], *, train_iter: int, envstep: int
    ) -> None:
        """Write values into the text log and into tensorboard, on rank 0."""
        if self._rank != 0:
            return
        self._logger.info("%s: %s\n%s", self._instance_name, title, table(values))
        for axis, at in (("iter", train_iter), ("step", envstep)):
            # A negative count says that no one counts.
            if at >= 0:
                for name, value in values.items():
                    tag = f"{self._instance_name}_{axis}/{name}"
                    self.tb_logger.add_scalar(tag, value, at)


def get_worker_cls(
    registry: Registry[Callable[..., T]], cfg: Mapping[str, Any], kind: str
) -> Callable[..., T]:
    """Return the class that ``cfg.type`` names, after importing ``cfg.import_names``.

    Raises:
        ConfigError: if ``cfg`` has no ``type``.
        RegistryError: if no one registered the name; the nearest names are listed.
    """
    if "type" not in cfg:
        raise ConfigError(
            f"{kind} is created by name, but the config has no key type; "
            f"add type: one of {', '.join(registry)}"
        )
    import_modules(cfg.get("import_names", ()))
    return registry.get(cfg["type"])
