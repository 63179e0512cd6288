"""The base class and the registry of serial evaluators."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Final, TypeVar

from dmiddleware.classic import BattleEnvManager
from dmiddleware.classic.config import Option, count, number, optional
from dmiddleware.env import BaseEnvManager
from dmiddleware.errors import ConfigError, DMiddlewareError
from dmiddleware.registry import Registry
from dmiddleware.worker.ranks import broadcast_from_first
from dmiddleware.worker.serial_worker import E, M, SerialWorker, get_worker_cls, spread

__all__ = [
    "BEST_CHECKPOINT",
    "SERIAL_EVALUATOR_REGISTRY",
    "EpisodeEvaluator",
    "ISerialEvaluator",
    "SaveCkpt",
    "create_serial_evaluator",
    "get_serial_evaluator_cls",
]

R = TypeVar("R")
A = TypeVar("A", bound=BaseEnvManager | BattleEnvManager)

BEST_CHECKPOINT: Final = "ckpt_best.safetensors"

SaveCkpt = Callable[[str], Any]

SERIAL_EVALUATOR_REGISTRY: Registry[Callable[..., ISerialEvaluator[Any, Any]]] = Registry(
    "serial evaluator"
)
"""Registered evaluators; ``@SERIAL_EVALUATOR_REGISTRY.register("mine")`` adds one."""


class ISerialEvaluator(SerialWorker[M, E]):
    """Evaluates a policy at intervals, in this process.

    Args:
        cfg: what differs from ``default_config()``; ``eval_freq`` is in training iterations.
        env: what the policy is evaluated in.
        policy: a policy, or its eval mode; battle evaluators take a list, one per player.
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
        env: Any = None,
        policy: Any = None,
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

    @abstractmethod
    def reset_env(self, _env: E | None = None) -> None:
        """Start fresh episodes, in other envs if given; envs are launched if they are not yet."""

    @abstractmethod
    def reset_policy(self, _policy: Any = None) -> None:
        """Clear the policy's state of the eval mode, or evaluate another policy from now on."""

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

    def reset(self, _policy: Any = None, _env: E | None = None) -> None:
        """Forget earlier evaluations; continue with another policy or in other envs if given."""
        if _env is not None or self._env is not None:
            self.reset_env(_env)
        if _policy is not None or self._policy is not None:
            self.reset_policy(_policy)
        self._last_eval_iter = None
        self._last_eval = None

    def state_dict(self) -> dict[str, Any]:
        """Return what the last evaluation judged by, and when it was."""
        return {"last_eval": self._last_eval, "last_eval_iter": self._last_eval_iter}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        self._last_eval = state.get("last_eval")
        self._last_eval_iter = state["last_eval_iter"]

    def _as_mode(self, policy: Any) -> M:
        mode: M = getattr(policy, "eval_mode", policy)
        return mode

    def _on_first_rank(self, evaluate: Callable[[], R]) -> R:
        """Evaluate on rank 0, and return its results on every rank.

        Raises:
            DMiddlewareError: on the other ranks, if rank 0 failed.
        """
        outcome: tuple[str, R | None] = ("", None)
        if self._rank == 0:
            try:
                outcome = ("", evaluate())
            except Exception as error:
                broadcast_from_first((f"{type(error).__name__}: {error}", None))
                raise
        failure, found = broadcast_from_first(outcome)
        if failure:
            raise DMiddlewareError(f"the evaluation on rank 0 failed: {failure}")
        result: R = found
        return result

    def _check_save_fn(self, save_ckpt_fn: object) -> None:
        if save_ckpt_fn is not None and not callable(save_ckpt_fn):
            raise ConfigError(
                f"save_ckpt_fn must be a function of the file name, got {save_ckpt_fn!r:.100}; "
                "pass learner.save_checkpoint"
            )


class EpisodeEvaluator(ISerialEvaluator[M, A]):
    """An evaluator that plays whole episodes, and judges the policy by their mean return.

    Args:
        cfg: what differs from ``default_config()``: ``n_episode`` is the number of episodes of an
            evaluation, ``stop_value`` the mean return at which to stop.
        env: an env manager.
        policy: a policy, or its eval mode.
        tb_logger: a tensorboardX ``SummaryWriter``.
        exp_name: folder for the output.
        instance_name: distinguishes evaluators in logs.
    """

    config: ClassVar[dict[str, Any]] = {
        "n_episode": Option(None, optional(count), "episodes per evaluation, at least one per env"),
        "stop_value": Option(
            None, optional(number), "mean return at which to stop; None never stops"
        ),
    }

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._best = float("-inf")

    @property
    def best_return(self) -> float:
        """The best mean return so far; minus infinity before the first evaluation."""
        return self._best

    def reset_env(self, _env: A | None = None) -> None:
        """Start fresh episodes, in other envs if given; envs are launched if they are not yet."""
        if _env is not None:
            self._env = self._checked_env(_env)
        if self.env.closed:
            self.env.launch()
        elif _env is None:
            self.env.reset()

    def reset(self, _policy: Any = None, _env: A | None = None) -> None:
        """Forget earlier evaluations; continue with another policy or in other envs if given."""
        super().reset(_policy, _env)
        self._best = float("-inf")

    def _n_episode(self, given: int | None) -> int:
        value = self._cfg.n_episode if given is None else given
        if value is None:
            raise ConfigError(
                f"{self} does not know how many episodes to play; pass eval(n_episode=...), or "
                "set n_episode in the config"
            )
        return int(value)

    def _judge(self, mean: float, train_iter: int, save_ckpt_fn: SaveCkpt | None) -> bool:
        """Save the best policy; return whether the mean return has reached ``stop_value``."""
        if mean > self._best:
            self._best = mean
            if save_ckpt_fn is not None:
                save_ckpt_fn(BEST_CHECKPOINT)
        stop_value = self._cfg.stop_value
        stop = stop_value is not None and mean >= stop_value and train_iter > 0
        if stop:
            self._logger.info(
                "%s: the mean return %.6g has reached stop_value %.6g",
                self._instance_name, mean, stop_value,
            )  # fmt: skip
        return stop

    def _log_returns(
        self,
        returns: list[float],
        steps: int,
        seconds: float,
        values: Mapping[str, float],
        *,
        train_iter: int,
        envstep: int,
    ) -> None:
        """Log an evaluation: its returns, steps and speed, and further values."""
        logged = {
            **values,
            **spread("reward", returns),
            "envstep_count": steps,
            "avg_envstep_per_episode": steps / len(returns),
            "avg_envstep_per_sec": steps / max(seconds, 1e-9),
            "evaluate_time": seconds,
        }
        title = f"iteration {train_iter}, env step {envstep}"
        self._show(title, logged, train_iter=train_iter, envstep=envstep)

    def state_dict(self) -> dict[str, Any]:
        """Return the best return, the last one, and when the last evaluation was."""
        return {**super().state_dict(), "best": self._best}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        super().load_state_dict(state)
        self._best = state["best"]


def get_serial_evaluator_cls(cfg: Mapping[str, Any]) -> Callable[..., ISerialEvaluator[Any, Any]]:
    """Return the class that ``cfg.type`` names, after importing ``cfg.import_names``.

    Without ``type``, it is ``interaction``.

    Raises:
        RegistryError: if the name is not registered; the nearest names are listed.
    """
    named = {"type": "interaction", **cfg}
    return get_worker_cls(SERIAL_EVALUATOR_REGISTRY, named, "a serial evaluator")


def create_serial_evaluator(cfg: Mapping[str, Any], **kwargs: Any) -> ISerialEvaluator[Any, Any]:
    """Build the evaluator that ``cfg.type`` names (default: ``interaction``).

    Args:
        cfg: the evaluator's config.
        kwargs: passed to the class's constructor.

    Raises:
        ConfigError: if the class rejects the config.
        RegistryError: if the name is not registered; the nearest names are listed.
    """
    return get_serial_evaluator_cls(cfg)(cfg, **kwargs)
