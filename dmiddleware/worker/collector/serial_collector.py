"""The base class and the registry of serial collectors."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import numpy as np
import torch

from dmiddleware.classic import CollectMode, as_collect_mode
from dmiddleware.classic.config import Option, count, switch
from dmiddleware.classic.modes import spec_attribute
from dmiddleware.env import BaseEnvManager, check_env_manager
from dmiddleware.errors import ConfigError
from dmiddleware.policy import HasModes
from dmiddleware.registry import Registry
from dmiddleware.rollout.collector import RolloutCollector
from dmiddleware.tree import Value, map_leaves
from dmiddleware.worker.ranks import sum_over_ranks
from dmiddleware.worker.serial_worker import E, M, SerialWorker, get_worker_cls, spread

__all__ = [
    "SERIAL_COLLECTOR_REGISTRY",
    "ISerialCollector",
    "RolloutSerialCollector",
    "Transition",
    "create_serial_collector",
    "get_serial_collector_cls",
    "to_float",
]

Transition = dict[str, Any]

_TOTALS = (
    "total_envstep", "total_samples", "total_episodes", "total_time_s", "last_print", "n_dropped",
)  # fmt: skip

SERIAL_COLLECTOR_REGISTRY: Registry[Callable[..., ISerialCollector[Any, Any]]] = Registry(
    "serial collector"
)
"""Registered collectors; ``@SERIAL_COLLECTOR_REGISTRY.register("mine")`` adds one."""


class ISerialCollector(SerialWorker[M, E]):
    """Collects in this process and returns transitions as dictionaries.

    Args:
        cfg: what differs from ``default_config()``: ``deepcopy_obs`` copies ``obs`` and
            ``next_obs`` of each transition (otherwise consecutive transitions share memory),
            ``transform_obs`` converts observations to float32, for the policy too,
            ``collect_print_freq`` is the number of training iterations between logs.
        env: an env manager.
        policy: a policy, or its collect mode; battle collectors take a list, one per player.
        tb_logger: a tensorboardX ``SummaryWriter``; None creates one on first use.
        exp_name: folder for the output.
        instance_name: distinguishes collectors in logs.
    """

    config: ClassVar[dict[str, Any]] = {
        "deepcopy_obs": Option(
            False, switch, "whether to copy obs and next_obs for each transition"
        ),
        "transform_obs": Option(False, switch, "whether to convert observations to float32"),
        "collect_print_freq": Option(100, count, "training iterations between logs"),
    }

    def __init__(
        self,
        cfg: Mapping[str, Any] | None = None,
        env: Any = None,
        policy: Any = None,
        tb_logger: Any = None,
        exp_name: str = "default_experiment",
        instance_name: str = "collector",
    ) -> None:
        super().__init__(cfg, env, policy, tb_logger, exp_name, instance_name)
        self._total_envstep = 0
        self._total_samples = 0
        self._total_episodes = 0
        self._total_time_s = 0.0
        self._last_print = 0
        self._n_dropped = 0
        self._clear_stats()

    @abstractmethod
    def collect(self, target: int | None = None, **kwargs: Any) -> Any:
        """Collect ``target`` samples or episodes, depending on the class."""

    @abstractmethod
    def reset_policy(self, _policy: Any = None) -> None:
        """Clear the policy's state of the collect mode, or use another policy from now on."""

    @abstractmethod
    def reset(self, _policy: Any = None, _env: Any = None) -> None:
        """Start fresh episodes, with another policy or in other envs if given; totals stay."""

    def reset_env(self, _env: E | None = None) -> None:
        """Start fresh episodes, in other envs if given; envs are launched if they are not yet."""
        self.reset(_env=_env)

    @property
    def envstep(self) -> int:
        """Env steps in total, over all ranks."""
        return self._total_envstep

    @envstep.setter
    def envstep(self, value: int) -> None:
        self._total_envstep = value

    @property
    def dropped_steps(self) -> int:
        """Transitions that were never returned, because their env failed or was reset."""
        return self._n_dropped

    def state_dict(self) -> dict[str, Any]:
        """Return totals, data kept between calls, and the state of the envs."""
        return {"totals": {name: getattr(self, f"_{name}") for name in _TOTALS}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state that :meth:`state_dict` returned; statistics are cleared."""
        self._clear_stats()
        for name in _TOTALS:
            setattr(self, f"_{name}", state["totals"][name])

    def _as_mode(self, policy: Any) -> M:
        mode: M = getattr(policy, "collect_mode", policy)
        return mode

    def _finished(self, transitions: list[Transition]) -> list[Transition]:
        """Convert and copy the observations of transitions as configured."""
        if self._cfg.transform_obs or self._cfg.deepcopy_obs:
            for transition in transitions:
                for key in ("obs", "next_obs"):
                    if key in transition:
                        transition[key] = map_leaves(self._transform, transition[key])
        return transitions

    def _transform(self, leaf: torch.Tensor) -> torch.Tensor:
        changed = leaf.float() if self._cfg.transform_obs else leaf
        return changed.clone() if self._cfg.deepcopy_obs else changed

    def _target(self, given: int | None, name: str, mode: CollectMode) -> int:
        """Return the number to collect: the given one, else the policy's."""
        own = {
            "n_sample": spec_attribute(mode.spec, "n_sample"),
            "n_episode": spec_attribute(mode.spec, "n_episode"),
        }
        value = own[name] if given is None else given
        if value is None:
            raise ConfigError(
                f"{self} does not know how much to collect; pass collect({name}=...), or set "
                f"collect.{name} in the policy's config"
            )
        if isinstance(value, bool) or not isinstance(value, int | np.integer) or value <= 0:
            raise ConfigError(f"{name} must be a positive integer, got {value!r}")
        return int(value)

    def _clear_stats(self) -> None:
        self._steps = self._samples = self._episodes = 0
        self._time_s = 0.0
        self._returns: list[float] = []

    def _count(
        self, steps: int, episodes: int, n_samples: int, began: float, *, is_recorded: bool = True
    ) -> None:
        """Count one call's work, summed over ranks; only in the totals if not ``is_recorded``."""
        steps, samples, episodes = (
            int(value) for value in sum_over_ranks([steps, n_samples, episodes])
        )
        duration_s = time.perf_counter() - began
        self._total_envstep += steps
        self._total_samples += samples
        self._total_episodes += episodes
        self._total_time_s += duration_s
        if is_recorded:
            self._steps += steps
            self._samples += samples
            self._episodes += episodes
            self._time_s += duration_s

    def _log(self, train_iter: int, extra: Mapping[str, float]) -> None:
        """Log, if ``collect_print_freq`` training iterations have passed since the last log."""
        if train_iter - self._last_print < self._cfg.collect_print_freq:
            return
        self._last_print = train_iter
        seconds = max(self._time_s, 1e-9)
        values: dict[str, float] = {
            "episode_count": self._episodes,
            "envstep_count": self._steps,
            "train_sample_count": self._samples,
            "avg_envstep_per_episode": self._steps / max(self._episodes, 1),
            "avg_envstep_per_sec": self._steps / seconds,
            "avg_train_sample_per_sec": self._samples / seconds,
            "avg_episode_per_sec": self._episodes / seconds,
            **spread("reward", self._returns),
            "total_envstep_count": self._total_envstep,
            "total_train_sample_count": self._total_samples,
            "total_episode_count": self._total_episodes,
            "total_duration": self._total_time_s,
            "dropped_envstep_count": self.dropped_steps,
            **extra,
        }
        self._show(
            f"iteration {train_iter}, env step {self._total_envstep}",
            values,
            train_iter=train_iter,
            envstep=self._total_envstep,
        )
        self._clear_stats()


class RolloutSerialCollector(ISerialCollector[CollectMode, BaseEnvManager]):
    """A collector of one policy, around a :class:`RolloutCollector`.

    Args:
        cfg: see :class:`ISerialCollector`.
        env: an env manager.
        policy: a policy, or its collect mode.
        tb_logger: a tensorboardX ``SummaryWriter``.
        exp_name: folder for the output.
        instance_name: distinguishes collectors in logs.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # It keeps unfinished episodes between calls.
        self._rollout: RolloutCollector | None = None

    def reset_policy(self, _policy: HasModes | CollectMode | None = None) -> None:
        """Clear the policy's state of the collect mode, or use another policy from now on."""
        if _policy is None:
            self.policy.reset()
            return
        self._policy = self._as_mode(_policy)
        if self._rollout is not None:
            self._rollout.reset(policy=self._acting_mode())
            self._drop_unfinished()

    def reset(
        self,
        _policy: HasModes | CollectMode | None = None,
        _env: BaseEnvManager | None = None,
    ) -> None:
        """Start fresh episodes, with another policy or in other envs if given; totals stay."""
        if _policy is not None:
            self._policy = self._as_mode(_policy)
        if _env is not None:
            self._env = self._checked_env(_env)
        self._drop_unfinished()
        self._clear_stats()
        if self._rollout is not None:
            self._rollout.reset(policy=self._acting_mode(), env_manager=self.env)
        elif _env is not None and _env.closed:
            _env.launch()

    @property
    def dropped_steps(self) -> int:
        """Transitions that were never returned, because their env failed or was reset."""
        return self._n_dropped + (0 if self._rollout is None else self._rollout.dropped_steps)

    def state_dict(self) -> dict[str, Any]:
        """Return totals, data kept between calls, and the state of the envs."""
        rollout = None if self._rollout is None else self._rollout.state_dict()
        return {"rollout": rollout, **super().state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state that :meth:`state_dict` returned; statistics are cleared."""
        super().load_state_dict(state)
        if state["rollout"] is not None:
            self._core().load_state_dict(state["rollout"])

    def _drop_unfinished(self) -> None:
        """Drop the data kept between calls."""

    def _core(self) -> RolloutCollector:
        if self._rollout is None:
            self._rollout = RolloutCollector(self._acting_mode(), self.env)
        return self._rollout

    def _as_mode(self, policy: HasModes | CollectMode) -> CollectMode:
        return as_collect_mode(policy, user=type(self).__name__)

    def _checked_env(self, env: BaseEnvManager) -> BaseEnvManager:
        check_env_manager(env, user=type(self).__name__)
        return env

    def _acting_mode(self) -> CollectMode:
        mode = self.policy
        if not self._cfg.transform_obs:
            return mode

        def forward(obs: Value, **kwargs: Any) -> dict[Any, Any]:
            return mode.forward(to_float(obs), **kwargs)

        return mode._replace(forward=forward)

    def _count_since(
        self,
        before: tuple[int, int],
        began: float,
        n_samples: int,
        returns: list[float],
        *,
        is_recorded: bool = True,
    ) -> None:
        """Count one call's work: what the rollout has done since ``before``."""
        core = self._core()
        steps, episodes = core.env_step - before[0], core.env_episode - before[1]
        self._count(steps, episodes, n_samples, began, is_recorded=is_recorded)
        if is_recorded:
            self._returns += returns


def to_float(obs: Value) -> Value:
    """Convert observations to float32."""
    floats: Value = map_leaves(torch.Tensor.float, obs)
    return floats


def get_serial_collector_cls(cfg: Mapping[str, Any]) -> Callable[..., ISerialCollector[Any, Any]]:
    """Return the class that ``cfg.type`` names, after importing ``cfg.import_names``.

    Raises:
        ConfigError: if ``cfg`` has no ``type``.
        RegistryError: if the name is not registered; the nearest names are listed.
    """
    return get_worker_cls(SERIAL_COLLECTOR_REGISTRY, cfg, "a serial collector")


def create_serial_collector(cfg: Mapping[str, Any], **kwargs: Any) -> ISerialCollector[Any, Any]:
    """Build the collector that ``cfg.type`` names (``sample``, ``episode``, ``sample_1v1``, …).

    Args:
        cfg: the collector's config, with ``type``.
        kwargs: passed to the class's constructor.

    Raises:
        ConfigError: if ``cfg`` has no ``type``, or if the class rejects the config.
        RegistryError: if the name is not registered; the nearest names are listed.
    """
    return get_serial_collector_cls(cfg)(cfg, **kwargs)
