"""The base class and the registry of serial evaluators."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from dmiddleware.config import Option, count
from dmiddleware.env import BaseEnvManager
from dmiddleware.policy import EvalMode, HasModes, as_eval_mode
from dmiddleware.registry import Registry
from dmiddleware.worker.serial_worker import SerialWorker, get_worker_cls

__all__ = [
    "SERIAL_EVALUATOR_REGISTRY",
    "ISerialEvaluator",
    "create_serial_evaluator",
    "get_serial_evaluator_cls",
]

SERIAL_EVALUATOR_REGISTRY: Registry[Callable[..., ISerialEvaluator]] = Registry("serial evaluator")
"""Registered evaluators; ``@SERIAL_EVALUATOR_REGISTRY.register("mine")`` adds one."""


class ISerialEvaluator(SerialWorker[EvalMode]):
    """Evaluates a policy at intervals, in this process.

    Args:
        cfg: what differs from ``default_config()``; ``eval_freq`` is in training iterations.
        env: an env manager.
        policy: a policy, or its eval mode.
        tb_logger: a tensorboardX ``SummaryWriter``; None creates one on first use.
        exp_name: folder for the output.
        instance_name: distinguishes evaluators in logs.
    """

    config: ClassVar[dict[str, Any]] = {
        "eval_freq": Option(1000, count, "training iterations between evaluations")
    }

    def __init__(
        self,
        cfg: Mapping[str, Any] | None = None,
        env: BaseEnvManager | None = None,
        policy: HasModes | EvalMode | None = None,
        tb_logger: Any = None,
        exp_name: str = "default_experiment",
        instance_name: str = "evaluator",
    ) -> None:
        super().__init__(cfg, env, policy, tb_logger, exp_name, instance_name)
        self._last_eval_iter: int | None = None
        self._last_eval: Any = None

    @property
    def last_eval(self) -> Any:
        """What the last evaluation judged by, such as the mean return; None before the first."""
        return self._last_eval

    @abstractmethod
    def eval(self, *args: Any, **kwargs: Any) -> tuple[bool, Any]:
        """Evaluate; return whether to stop, and the results."""

    def _as_mode(self, policy: HasModes | EvalMode) -> EvalMode:
        return as_eval_mode(policy, user=type(self).__name__)

    def should_eval(self, train_iter: int) -> bool:
        """Return whether to evaluate: at iteration 0, then every ``eval_freq`` iterations.

        True counts as an evaluation, so it is returned once per iteration at most.
        """
        last = self._last_eval_iter
        if train_iter == last:
            return False
        if train_iter != 0 and train_iter - (last or 0) < self._cfg.eval_freq:
            return False
        self._last_eval_iter = train_iter
        return True

    def reset_env(self, _env: BaseEnvManager | None = None) -> None:
        """Start fresh episodes, in other envs if given; envs are launched if they are not yet."""
        if _env is not None:
            self._env = self._checked_env(_env)
        if self.env.closed:
            self.env.launch()
        elif _env is None:
            self.env.reset()

    def reset_policy(self, _policy: HasModes | EvalMode | None = None) -> None:
        """Clear the policy's state of the eval mode, or evaluate another policy from now on."""
        if _policy is not None:
            self._policy = self._as_mode(_policy)
        self.policy.reset()

    def reset(
        self, _policy: HasModes | EvalMode | None = None, _env: BaseEnvManager | None = None
    ) -> None:
        """Forget earlier evaluations; continue with another policy or in other envs if given."""
        if _env is not None or self._env is not None:
            self.reset_env(_env)
        if _policy is not None or self._policy is not None:
            self.reset_policy(_policy)
        self._last_eval_iter = None
        self._last_eval = None


def get_serial_evaluator_cls(cfg: Mapping[str, Any]) -> Callable[..., ISerialEvaluator]:
    """Return the class that ``cfg.type`` names, after importing ``cfg.import_names``.

    Without ``type``, it is ``interaction``.

    Raises:
        RegistryError: if the name is not registered; the nearest names are listed.
    """
    named = {"type": "interaction", **cfg}
    return get_worker_cls(SERIAL_EVALUATOR_REGISTRY, named, "a serial evaluator")


def create_serial_evaluator(cfg: Mapping[str, Any], **kwargs: Any) -> ISerialEvaluator:
    """Build the evaluator that ``cfg.type`` names (default: ``interaction``).

    Args:
        cfg: the evaluator's config.
        kwargs: passed to the class's constructor.

    Raises:
        ConfigError: if the class rejects the config.
        RegistryError: if the name is not registered; the nearest names are listed.
    """
    return get_serial_evaluator_cls(cfg)(cfg, **kwargs)
