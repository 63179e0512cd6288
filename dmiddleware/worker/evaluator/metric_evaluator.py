"""An evaluator for supervised learning: a metric over a data loader."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, NamedTuple, Protocol, TypeGuard

import numpy as np
import torch

from dmiddleware.classic import Policy
from dmiddleware.classic.config import Option, anything, count, optional, switch
from dmiddleware.errors import ConfigError
from dmiddleware.worker.evaluator.serial_evaluator import (
    BEST_CHECKPOINT,
    SERIAL_EVALUATOR_REGISTRY,
    ISerialEvaluator,
    SaveCkpt,
)
from dmiddleware.worker.ranks import sum_over_ranks

__all__ = ["IMetric", "MetricSerialEvaluator"]


class IMetric(ABC):
    """How good predictions are.

    Example:
        >>> class Accuracy(IMetric):
        ...     def eval(self, inputs, label):
        ...         return {"accuracy": float((inputs["action"] == label).float().mean())}
        ...
        ...     def reduce_mean(self, inputs):
        ...         return {"accuracy": sum(one["accuracy"] for one in inputs) / len(inputs)}
        ...
        ...     def gt(self, metric1, metric2):
        ...         return metric2 is None or metric1["accuracy"] >= metric2["accuracy"]
    """

    @abstractmethod
    def eval(self, inputs: Any, label: Any) -> dict[str, Any]:
        """Return the values of a batch, as numbers by name.

        Args:
            inputs: what the policy returned for the batch.
            label: what the loader gave as labels.
        """

    @abstractmethod
    def reduce_mean(self, inputs: list[Any]) -> Any:
        """Return the mean of what :meth:`eval` returned for all batches."""

    @abstractmethod
    def gt(self, metric1: Any, metric2: Any) -> bool:
        """Return whether the first is at least as good as the second; True if that is None."""


class _Predictor(Protocol):
    """The methods of an eval mode that this evaluator calls."""

    forward: Callable[..., Any]
    reset: Callable[..., Any]


class _Task(NamedTuple):
    """The env of the evaluator: a loader of pairs (inputs, label), and the metric."""

    loader: Iterable[Any]
    metric: IMetric

    def close(self) -> None:
        """Do nothing: the caller owns the loader."""


@SERIAL_EVALUATOR_REGISTRY.register("metric")
class MetricSerialEvaluator(ISerialEvaluator[_Predictor, _Task]):
    """Evaluates a policy on a data set, by a metric.

    With several ranks, rank 0 evaluates and broadcasts the results; with ``multi_gpu``, every rank
    evaluates its own part of the data, and the values are averaged, weighted by the numbers of
    rows.

    Args:
        cfg: what differs from ``default_config()``:

            - ``eval_freq``: training iterations between evaluations;
            - ``stop_value``: a metric, as :meth:`IMetric.gt` takes it, at which to stop; None:
              never;
            - ``multi_gpu``: whether every rank evaluates a part of the data.
        env: ``(loader, metric)``: the loader is iterated for pairs of inputs and labels.
        policy: a policy, or its eval mode; its forward is called with the inputs. The
            ``_forward_eval`` of a classic policy gets the inputs as the loader gives them.
        tb_logger: a tensorboardX ``SummaryWriter``; None creates one on first use.
        exp_name: folder for the output.
        instance_name: distinguishes evaluators in logs.
    """

    config: ClassVar[dict[str, Any]] = {
        "eval_freq": Option(50, count, "training iterations between evaluations"),
        "stop_value": Option(None, optional(anything), "metric at which to stop; None never stops"),
        "multi_gpu": Option(False, switch, "whether every rank evaluates a part of the data"),
    }

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._best: Any = None

    @property
    def best_metric(self) -> Any:
        """The best metric so far; None before the first evaluation."""
        return self._best

    def reset_env(self, _env: tuple[Iterable[Any], IMetric] | None = None) -> None:
        """Evaluate on other data, or by another metric, from now on."""
        if _env is not None:
            self._env = self._checked_env(_env)

    def reset_policy(self, _policy: Any = None) -> None:
        """Clear the policy's state of the eval mode, or evaluate another policy from now on."""
        if _policy is not None:
            self._policy = self._as_mode(_policy)
        self.policy.reset()

    def reset(self, _policy: Any = None, _env: Any = None) -> None:
        """Forget earlier evaluations; continue with another policy or other data if given."""
        super().reset(_policy, _env)
        self._best = None

    def eval(
        self, save_ckpt_fn: SaveCkpt | None = None, train_iter: int = -1, envstep: int = -1
    ) -> tuple[bool, Any]:
        """Evaluate.

        Args:
            save_ckpt_fn: called with a file name when the metric is the best so far.
            train_iter: training iterations so far; negative: unknown.
            envstep: env steps so far; negative: unknown.

        Returns:
            Whether to stop (the metric has reached ``stop_value``, and ``train_iter`` is positive),
            and the metric.

        Raises:
            ConfigError: if the loader is empty.
            DMiddlewareError: on the other ranks, if rank 0 failed.
        """
        self._check_save_fn(save_ckpt_fn)
        began = time.perf_counter()
        if self._cfg.multi_gpu:
            found = _mean_over_ranks(*self._measure())
        else:
            found, _ = self._on_first_rank(self._measure)
        values = {name: float(value) for name, value in _numbers(found).items()}
        self._show(
            f"iteration {train_iter}",
            {**values, "evaluate_time": time.perf_counter() - began},
            train_iter=train_iter,
            envstep=envstep,
        )
        self._last_eval = found
        metric = self.env.metric
        if metric.gt(found, self._best):
            self._best = found
            if save_ckpt_fn is not None and self._rank == 0:
                save_ckpt_fn(BEST_CHECKPOINT)
        stop_value = self._cfg.stop_value
        stop = stop_value is not None and metric.gt(found, stop_value) and train_iter > 0
        if stop:
            self._logger.info("%s: %s has reached %s", self._instance_name, found, stop_value)
        return stop, found

    def _measure(self) -> tuple[Any, int]:
        """Return the metric on this rank's data, and the number of rows."""
        loader, metric = self.env
        found, n_rows = [], 0
        for inputs, label in loader:
            output = self.policy.forward(inputs)
            found.append(metric.eval(output, label))
            n_rows += len(label)
        if not found:
            raise ConfigError(f"the loader of {self} is empty; give it at least one batch")
        return metric.reduce_mean(found), n_rows

    def state_dict(self) -> dict[str, Any]:
        """Return the best metric, the last one, and when it was measured."""
        return {**super().state_dict(), "best": self._best}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        super().load_state_dict(state)
        self._best = state["best"]

    def _as_mode(self, policy: Any) -> _Predictor:
        # Not as_eval_mode: a mode predicts batches here, and does not act env by env.
        mode = getattr(policy, "eval_mode", policy)
        owner = getattr(getattr(mode, "forward", None), "__self__", None)
        if isinstance(owner, Policy):
            mode = mode._replace(forward=owner.predict)
        if not (
            callable(getattr(mode, "forward", None)) and callable(getattr(mode, "reset", None))
        ):
            raise ConfigError(
                f"MetricSerialEvaluator takes a policy or its eval_mode, got {policy!r:.100}"
            )
        predictor: _Predictor = mode
        return predictor

    def _checked_env(self, env: Any) -> _Task:
        is_pair = isinstance(env, tuple | list) and len(env) == 2
        if not is_pair or not isinstance(env[0], Iterable) or not isinstance(env[1], IMetric):
            raise ConfigError(
                f"MetricSerialEvaluator takes env=(loader, metric), an iterable of batches and an "
                f"IMetric, got {env!r:.100}"
            )
        return _Task(*env)


def _numbers(metric: Any) -> dict[str, Any]:
    """Return the numbers in a metric, by name."""
    if not isinstance(metric, Mapping):
        return {"metric": metric} if _is_number(metric) else {}
    return {str(name): value for name, value in metric.items() if _is_number(value)}


def _is_number(value: Any) -> TypeGuard[float]:
    if isinstance(value, torch.Tensor):
        return value.numel() == 1
    return isinstance(value, int | float | np.number)


def _mean_over_ranks(metric: Any, n_rows: int) -> Any:
    """Average the numbers in a metric over all ranks, weighted by rows; the rest stays."""
    numbers = _numbers(metric)
    *sums, total = sum_over_ranks([*(float(one) * n_rows for one in numbers.values()), n_rows])
    means = dict(zip(numbers, (one / total for one in sums), strict=True))
    return {**metric, **means} if isinstance(metric, Mapping) else means.get("metric", metric)
