"""The base class and the registry of parallel collectors."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Final

from dmiddleware.classic.config import Configurable, Option, count, switch
from dmiddleware.classic.logs import LOG_TO_FILE, TextLog
from dmiddleware.env.timestep import EnvTimestep
from dmiddleware.errors import ConfigError
from dmiddleware.registry import Registry
from dmiddleware.worker.serial_worker import get_worker_cls

__all__ = [
    "PARALLEL_COLLECTOR_REGISTRY",
    "BaseParallelCollector",
    "create_parallel_collector",
    "get_parallel_collector_cls",
]

PARALLEL_COLLECTOR_REGISTRY: Registry[Callable[..., BaseParallelCollector]] = Registry(
    "parallel collector"
)
"""Registered collectors; ``@PARALLEL_COLLECTOR_REGISTRY.register("mine")`` adds one."""

_CLOSE_TIMEOUT_S: Final = 60.0


class BaseParallelCollector(Configurable, ABC):
    """Runs one collector task of a coordinator: plays in envs, and hands over what it collects.

    :meth:`start` updates the policy and then repeats ``_policy_inference``, ``_env_step``,
    ``_process_timestep`` and ``_iter_after_hook``, until the envs have played their episodes or
    :meth:`close` is called. A subclass writes these methods, sets ``self._env_manager``, and may
    override the hooks ``_setup_timer``, ``_setup_logger``, ``_start_thread``, ``_join_thread``,
    ``_finish_task`` and ``_is_done``, which asks the envs' ``done``.

    A communicating collector sets three functions before :meth:`start`: ``send_metadata(metadata)``
    announces step data or reports progress, ``send_stepdata(path, stepdata)`` stores a sample and
    returns its reference or None, and ``get_policy_update_info(path)`` returns a policy's state
    with its ``iter``, or None if there is none newer than the last one.

    Args:
        cfg: what differs from ``default_config()``; ``exp_name`` is the folder for the log.
        clock: seconds that never decrease.

    Raises:
        ConfigError: for an unusable config.
    """

    config: ClassVar[dict[str, Any]] = {
        "print_freq": Option(5, count, "steps of the envs from one line of the log to the next"),
        "eval_flag": Option(False, switch, "whether the task evaluates and sends no samples"),
        "log_to_file": LOG_TO_FILE,
    }

    send_metadata: Callable[[dict[str, Any]], Any]
    send_stepdata: Callable[[str, Any], str | None]
    get_policy_update_info: Callable[[str], Mapping[str, Any] | None]

    def __init__(
        self,
        cfg: Mapping[str, Any] | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cfg = self.merged_config(cfg)
        self._eval_flag: bool = self._cfg.eval_flag
        self._prefix = "EVALUATOR" if self._eval_flag else "COLLECTOR"
        self._exp_name = self._cfg.get("exp_name", "default_experiment")
        self._clock = clock
        self._policy: Any = None
        self._env_manager: Any = None
        self._iter_count = 0
        self._end = threading.Event()
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._end_time: float | None = None
        self._setup_timer()
        self._setup_logger()

    @property
    def policy(self) -> Any:
        """The mode of the policy that the collector uses; marine has a list."""
        return self._policy

    @policy.setter
    def policy(self, policy: Any) -> None:
        self._policy = policy

    @property
    def env_manager(self) -> Any:
        """The env manager."""
        return self._env_manager

    def start(self) -> None:
        """Collect until the envs have played their episodes, or :meth:`close` is called.

        Blocks; call it in a thread of its own. It can be called once.

        Raises:
            ConfigError: if one of the three functions has not been set, or it has run before.
            EnvCrashed: if an env keeps failing.
        """
        self._check_functions()
        with self._lock:
            if self._thread is not None:
                raise ConfigError(f"{self} has run already; create a collector for each task")
            self._thread = threading.current_thread()
        self._setup_timer()
        try:
            if not self._end.is_set():
                self._run()
        finally:
            self._end_time = self._clock()
            self._join_thread()
            self._close_envs()
            self._stopped.set()

    def _run(self) -> None:
        self._update_policy()
        self._start_thread()
        while not self._end.is_set():
            action = self._policy_inference(self._ready_obs())
            self._process_timestep(self._env_step(action))
            self._iter_after_hook()
            if self._is_done():
                self._finish_task()
                break

    def _is_done(self) -> bool:
        """Return whether the envs have played their episodes."""
        return bool(self._env_manager.done)

    def _ready_obs(self) -> dict[int, Any]:
        """Return the observations to act on, by env id."""
        ready: dict[int, Any] = self._env_manager.ready_obs
        return ready

    def close(self) -> None:
        """End :meth:`start` after the step in hand, and wait for it; may be called twice.

        Raises:
            TimeoutError: if the step in hand does not end within 60 seconds.
        """
        self._end.set()
        with self._lock:
            thread = self._thread
            if thread is None:
                self._thread = threading.current_thread()  # it can no longer be started
        if thread is None:
            self._close_envs()
            self._stopped.set()
        elif thread is not threading.current_thread() and not self._stopped.wait(_CLOSE_TIMEOUT_S):
            raise TimeoutError(f"{self} did not end its step within {_CLOSE_TIMEOUT_S:g} s")

    def info(self, message: str) -> None:
        """Write a line to the log."""
        self._logger.info("%s", message)

    def debug(self, message: str) -> None:
        """Write a line to the log, of level DEBUG."""
        self._logger.debug("%s", message)

    def error(self, message: str) -> None:
        """Write a line to the log, of level ERROR."""
        self._logger.error("%s", message)

    @abstractmethod
    def get_finish_info(self) -> dict[str, Any]:
        """Return the result of the task."""

    @abstractmethod
    def __repr__(self) -> str:
        """Return the collector's name."""

    @abstractmethod
    def _policy_inference(self, obs: dict[int, Any]) -> dict[int, Any]:
        """Return the action for each env whose observation is given."""

    @abstractmethod
    def _env_step(self, action: dict[int, Any]) -> dict[int, EnvTimestep]:
        """Step the envs; return what each of them made of its action."""

    @abstractmethod
    def _process_timestep(self, timestep: dict[int, EnvTimestep]) -> None:
        """Store transitions, and hand over complete trajectories."""

    @abstractmethod
    def _update_policy(self) -> None:
        """Load the policy's newest weights, if there are newer ones."""

    def _setup_timer(self) -> None:
        """Start to measure the task's duration; called by the constructor and :meth:`start`."""
        self._start_time = self._clock()

    def _duration(self) -> float:
        """Return the seconds that the task has taken."""
        return (self._clock() if self._end_time is None else self._end_time) - self._start_time

    def _setup_logger(self) -> None:
        """Open the log ``<exp_name>/log/<prefix>/<prefix>_logger.txt``."""
        self._logger = TextLog.of_worker(
            type(self).__module__,
            self._exp_name,
            self._prefix,
            to_file=self._cfg.log_to_file,
        )

    def _start_thread(self) -> None:
        """Start what runs beside the loop; called before the first step."""

    def _join_thread(self) -> None:
        """End what runs beside the loop; called after the last step."""

    def _iter_after_hook(self) -> None:
        """Log at every ``print_freq``-th step; called after each step."""
        self._iter_count += 1
        if self._iter_count % self._cfg.print_freq == 0:
            self.debug(f"{self}: {self._iter_count} steps")

    def _finish_task(self) -> None:
        """Called once, when the envs have played their episodes."""

    def _close_envs(self) -> None:
        if self._env_manager is not None:
            self._env_manager.close()

    def _check_functions(self) -> None:
        for name in ("send_metadata", "send_stepdata", "get_policy_update_info"):
            if not callable(getattr(self, name, None)):
                raise ConfigError(
                    f"{self} has no function {name}; set {name} to one before start(), as "
                    "communicating collectors do"
                )


def get_parallel_collector_cls(cfg: Mapping[str, Any]) -> Callable[..., BaseParallelCollector]:
    """Return the class that ``cfg.type`` names, after importing ``cfg.import_names``.

    Raises:
        ConfigError: if ``cfg`` has no ``type``.
        RegistryError: if the name is not registered; the nearest names are listed.
    """
    return get_worker_cls(PARALLEL_COLLECTOR_REGISTRY, cfg, "a parallel collector")


def create_parallel_collector(cfg: Mapping[str, Any]) -> BaseParallelCollector:
    """Build the collector that ``cfg.type`` names (``zergling``, ``marine``).

    Args:
        cfg: the collector's config, with ``type``.

    Raises:
        ConfigError: if ``cfg`` has no ``type``, or if the class rejects the config.
        RegistryError: if the name is not registered; the nearest names are listed.
    """
    return get_parallel_collector_cls(cfg)(cfg)
