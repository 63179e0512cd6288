"""The base of serial collectors and evaluators: a policy, envs, and logs."""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import numpy as np

from dmiddleware.classic.config import Configurable
from dmiddleware.classic.import_names import import_named
from dmiddleware.classic.logs import LOG_TO_FILE, LazyWriter, TextLog, log_folder, table
from dmiddleware.errors import ConfigError
from dmiddleware.process.closing import Closing
from dmiddleware.registry import Registry
from dmiddleware.worker.ranks import rank_and_world_size

__all__ = ["SerialWorker", "get_worker_cls", "spread"]

T = TypeVar("T")
M = TypeVar("M")
E = TypeVar("E", bound="Closable")


class Closable(Protocol):
    """What a worker works in."""

    def close(self) -> None:
        """Release its resources."""


class SerialWorker(Closing, Configurable, ABC, Generic[M, E]):
    """A policy in envs, in this process, with a text log and a TensorBoard writer.

    Args:
        cfg: what differs from ``default_config()``.
        env: an env manager; launched on first use, if it is not launched yet.
        policy: a policy, or the mode of it that the worker uses; battle workers take a list.
        tb_logger: a tensorboardX ``SummaryWriter``; None creates one in ``<exp_name>/log`` on first
            use.
        exp_name: folder for the worker's output.
        instance_name: distinguishes workers of one kind in logs.

    Raises:
        ConfigError: for an unusable config, or an argument of the wrong type.
    """

    config: ClassVar[dict[str, Any]] = {
        "log_to_file": LOG_TO_FILE,
    }

    def __init__(
        self,
        cfg: Mapping[str, Any] | None = None,
        env: Any = None,
        policy: Any = None,
        tb_logger: Any = None,
        exp_name: str = "default_experiment",
        instance_name: str = "worker",
    ) -> None:
        self._cfg = self.merged_config(cfg)
        self._env: E | None = None if env is None else self._checked_env(env)
        self._policy: M | None = None if policy is None else self._as_mode(policy)
        self._exp_name = exp_name
        self._instance_name = instance_name
        self._rank, self._world_size = rank_and_world_size()
        self._logger = TextLog.of_worker(
            type(self).__module__,
            exp_name,
            instance_name,
            to_file=self._cfg.log_to_file and self._rank == 0,
        )
        self._writer = LazyWriter(tb_logger, log_folder(exp_name, instance_name))

    @property
    def env(self) -> E:
        """The env manager.

        Raises:
            ConfigError: if none was given.
        """
        if self._env is None:
            raise ConfigError(
                f"{self} has no envs; pass env=env_manager, or call reset_env(env_manager)"
            )
        return self._env

    @property
    def policy(self) -> M:
        """The policy's mode.

        Raises:
            ConfigError: if no policy was given.
        """
        if self._policy is None:
            raise ConfigError(
                f"{self} has no policy; pass policy=policy, or call reset_policy(policy)"
            )
        return self._policy

    @property
    def tb_logger(self) -> Any:
        """The TensorBoard writer."""
        return self._writer.get()

    def _as_mode(self, policy: Any) -> M:
        """Return the mode of a policy that the worker uses; by default what was passed."""
        mode: M = policy
        return mode

    def _checked_env(self, env: Any) -> E:
        """Return what was passed as envs, or reject it; by default anything is accepted.

        Raises:
            ConfigError: saying what the worker takes.
        """
        envs: E = env
        return envs

    def close(self) -> None:
        """Close the envs, and the TensorBoard writer if the worker created it."""
        if self._env is not None:
            self._env.close()
        self._writer.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._instance_name!r})"

    def _show(
        self, title: str, values: Mapping[str, float], *, train_iter: int, envstep: int
    ) -> None:
        """Write values to the text log and to TensorBoard, on rank 0."""
        if self._rank != 0:
            return
        self._logger.info("%s: %s\n%s", self._instance_name, title, table(values))
        for axis, at in (("iter", train_iter), ("step", envstep)):
            # A negative count is an unknown one.
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
        RegistryError: if the name is not registered; the nearest names are listed.
    """
    if "type" not in cfg:
        raise ConfigError(
            f"{kind} is created by name, but the config has no key type; "
            f"add type: one of {', '.join(registry)}"
        )
    import_named(cfg.get("import_names"))
    return registry.get(cfg["type"])


def spread(name: str, values: list[float]) -> dict[str, float]:
    """Return mean, standard deviation, maximum and minimum; empty without values."""
    if not values:
        return {}
    return {
        f"{name}_mean": float(np.mean(values)),
        f"{name}_std": float(np.std(values)),
        f"{name}_max": max(values),
        f"{name}_min": min(values),
    }
