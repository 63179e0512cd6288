"""The contexts of reinforcement learning."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import torch

from dmiddleware.pipeline import Context, Vocabulary, kept, produced, renewed
from dmiddleware.process.torch_threads import limited_threads
from dmiddleware.tree import Batch, Value
from middleware.roles import Role

__all__ = ["OfflineRLContext", "OnlineRLContext", "RLContext"]

_COLLECTOR: Final = "a collector such as StepCollector(policy, env, n_sample=...)"
_EVALUATOR: Final = "InteractionEvaluator(policy, env, n_episode=...)"


@dataclass
class RLContext(Context):
    """What learning from an environment and learning from a dataset have in common.

    Attributes:
        train_iter: updates of the policy.
        last_eval_iter: the ``train_iter`` of the last evaluation, -1 before the first.
        last_eval_value: the mean return of the last evaluation, ``-inf`` before the first.
        trajectories: newly collected transitions ``[T, E, …]`` or ``[N, …]``.
        train_data: the data that the learner learns from in this step.
        train_output: the learner's metrics: those of each update, or of the only one.
        eval_value: the mean return of an evaluation in this step.
        eval_output: further results of that evaluation.
        other_evaluations: the results of evaluations in this step that do not decide on the best
            policy, by the name of the evaluator.
        trained_env_step: transitions learned from, counted each time they are used.
        learning_held: whether an exchange pauses learning in this step to keep its pace.
    """

    vocabulary: ClassVar[Vocabulary] = Vocabulary(
        roles=tuple(map(str, Role)),
        lead_role=Role.LEARNER,
        writers={
            "obs": _COLLECTOR,
            "action": _COLLECTOR,
            "inference_output": _COLLECTOR,
            "trajectories": "StepCollector(policy, env, n_sample=...)",
            "trajectory_end_idx": "StepCollector(policy, env, n_sample=...)",
            "episodes": "EpisodeCollector(policy, env, n_episode=...)",
            "train_data": "GAEEstimator(policy), or a middleware that samples a buffer,",
            "train_output": "a learner such as OffPolicyLearner(policy, buffer)",
            "eval_value": _EVALUATOR,
            "eval_output": _EVALUATOR,
        },
        filler="DataPusher(buffer)",
        exchange="a ContextExchanger",
        counters={"env_step": "env steps", "train_iter": "updates"},
        columns=("env_step", "train_iter", "time_s"),
    )

    train_iter: int = kept(0, summed=True)
    trained_env_step: int = kept(0, summed=True)
    last_eval_iter: int = kept(-1)
    last_eval_value: float = kept(float("-inf"))
    trajectories: Batch | None = produced()
    train_data: Batch | None = produced()
    train_output: list[dict[str, Any]] | dict[str, Any] | None = produced()
    eval_value: float | None = produced()
    eval_output: dict[str, Any] | None = produced()
    other_evaluations: dict[str, dict[str, Any]] = renewed(default_factory=dict)
    learning_held: bool = renewed(False)

    def begin_run(self, at_close: Callable[[Callable[[], object]], object]) -> None:
        """Let torch use one thread, or as many as were asked for, until the task is closed."""
        stack = ExitStack()
        stack.enter_context(limited_threads())
        at_close(stack.close)


@dataclass
class OnlineRLContext(RLContext):
    """The context of learning from an environment.

    Attributes:
        env_step: environment steps, summed over all collectors.
        env_episode: finished episodes, summed over all collectors.
        collect_kwargs: keyword arguments for the collecting policy's forward, such as ``eps``.
        obs: observations to act on.
        action: actions to take.
        inference_output: the output of the policy's forward.
        trajectory_end_idx: int64: the transitions in ``trajectories`` that end an episode.
        episodes: newly collected whole episodes, a batch ``[T_i, …]`` for each.
    """

    env_step: int = kept(0, summed=True)
    env_episode: int = kept(0, summed=True)
    collect_kwargs: dict[str, Any] = renewed(default_factory=dict)
    obs: Value | None = renewed(None)
    action: Value | None = renewed(None)
    inference_output: Batch | None = renewed(None)
    trajectory_end_idx: torch.Tensor | None = produced()
    episodes: list[Batch] | None = produced()


@dataclass
class OfflineRLContext(RLContext):
    """The context of learning from a dataset.

    Attributes:
        train_epoch: finished passes over the dataset.
    """

    train_epoch: int = kept(0, summed=True)
