"""Distillation: a student learns what a teacher would have done where the student goes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

import gymnasium as gym

from dmiddleware.errors import ConfigError
from dmiddleware.policy import CollectMode, EvalMode, HasModes, as_collect_mode, as_eval_mode
from dmiddleware.tree import Batch, Nested, as_tree

__all__ = ["labeled_by"]

_USER: Final = "labeled_by"
_LABEL: Final = "teacher_action"


def labeled_by(teacher: HasModes | EvalMode, student: HasModes | CollectMode) -> CollectMode:
    """Return a collect mode in which the student acts, and the rows have the teacher's actions.

    This is DAgger (Ross, Gordon and Bagnell, "A Reduction of Imitation Learning and Structured
    Prediction to No-Regret Online Learning", 2011, algorithm 3.1) with β = 0: the states are those
    that the student visits, and a buffer that keeps all rows is the growing data set. With
    :class:`~dmiddleware.policy.BCPolicy` as the student, the loss is the cross-entropy of choices,
    and the squared error of continuous actions. The teacher may see parts of observations that the
    student does not (see ``obs_groups``); rows keep what the student reads::

        collector = StepCollector(labeled_by(teacher, student), envs, n_sample=256)
        task.use(collector, data_pusher(buffer), OffPolicyLearner(student, buffer))

    Args:
        teacher: a policy or its eval mode, such as ``load_policy("runs/teacher").policy``.
        student: a policy or its collect mode.

    Raises:
        ConfigError: if the student learns from actions of its own, or the teacher has a memory, or
            sees inputs that the student does not ask for.
    """
    guide, pupil = as_eval_mode(teacher, user=_USER), as_collect_mode(student, user=_USER)
    if pupil.spec.on_policy:
        raise ConfigError(
            f"{pupil.spec.kind.__name__} learns from its own actions, not from a teacher's; use "
            "BCPolicy as the student"
        )
    if guide.spec.initial_state(1) is not None:
        raise ConfigError(
            f"the teacher, a {guide.spec.kind.__name__}, has a memory, which nobody keeps while "
            "the student acts; use a teacher without one"
        )
    unseen = set(guide.spec.act_inputs) - {*pupil.spec.act_inputs, "action_mask"}
    if unseen:
        raise ConfigError(
            f"the teacher, a {guide.spec.kind.__name__}, also acts on {', '.join(sorted(unseen))} "
            "(act_inputs), which the student does not ask for; use a teacher without it"
        )
    inputs = {name.partition(".")[0] for name in guide.spec.act_inputs}

    def forward(obs: Nested, *, env_id: Any = None, **kwargs: Any) -> dict[str, Any]:
        output = pupil.forward(obs, env_id=env_id, **kwargs)
        extra = {name: kwargs[name] for name in inputs & kwargs.keys()}
        return {**output, _LABEL: guide.forward(obs, env_id=env_id, **extra)["action"]}

    def train_batch(batch: Batch) -> Batch:
        columns = {name: batch[name] for name in batch if name != _LABEL}
        return pupil.train_batch(as_tree({**columns, "action": batch[_LABEL]}))

    def check_spaces(observation: gym.Space[Any], action: gym.Space[Any]) -> None:
        pupil.spec.check_spaces(observation, action)
        guide.spec.check_spaces(observation, action)

    def reset(env_ids: Any = None) -> None:
        pupil.reset(env_ids)
        guide.reset(env_ids)

    spec = replace(pupil.spec, check_spaces=check_spaces)
    return replace(pupil, forward=forward, train_batch=train_batch, spec=spec, reset=reset)
