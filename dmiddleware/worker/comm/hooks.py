"""Hooks with which a learner sends its policy and its progress."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from dmiddleware.errors import ConfigError
from dmiddleware.worker.learner.hooks import (
    LearnerHook,
    finished_iterations,
    register_learner_hook,
)

if TYPE_CHECKING:
    from dmiddleware.worker.learner import BaseLearner

__all__ = ["LearnInfos", "SendLearnInfoHook", "SendPolicyHook"]


class _Sender(Protocol):
    """What a communicating learner sets on its learner."""

    def send_policy(self, state_dict: Mapping[str, Any]) -> None: ...

    def send_learn_info(self, info: Mapping[str, Any]) -> None: ...


class _SendHook(LearnerHook):
    """A hook that sends every n-th iteration, and always at the other positions."""

    _key: str
    _default: int

    def __init__(
        self, *args: Any, position: str, ext_args: Mapping[str, Any] | None = None, **kwargs: Any
    ) -> None:
        super().__init__(*args, position=position, **kwargs)
        freq = self._option(ext_args, self._key, self._default)
        if type(freq) is not int or freq < 1:
            raise ConfigError(
                f"hook {self.name!r}: {self._key} must be an integer ≥ 1, got {freq!r}"
            )
        self._freq = freq

    def _is_due(self, engine: BaseLearner) -> bool:
        n_iterations = finished_iterations(engine, self.position)
        return self.position != "after_iter" or n_iterations % self._freq == 0


class SendPolicyHook(_SendHook):
    """Sends the policy's weights to the collectors, on rank 0.

    It calls the learner's ``send_policy`` with ``{'model': …, 'iter': n}``, where ``n`` is the
    number of finished iterations. The weights are a copy, which later updates do not change. What
    else the policy needs to act, such as statistics of observations, is sent with them.

    Args:
        args: name and priority.
        position: ``before_run`` or ``after_iter``, usually.
        ext_args: ``send_policy_freq``, in iterations (``after_iter`` only); default: 1.
    """

    _key, _default = "send_policy_freq", 1

    def __call__(self, engine: BaseLearner) -> None:
        """Send, if an interval has passed."""
        if engine.rank != 0 or not self._is_due(engine):
            return
        # A learn mode's own state has the optimizer too.
        acting = engine.policy.spec.acting_state()
        sender: _Sender = engine  # type: ignore[assignment]
        sender.send_policy({**acting, "iter": finished_iterations(engine, self.position)})


class LearnInfos:
    """Merges a learner's infos until they are sent: the newest values, and all priorities."""

    def __init__(self) -> None:
        self._merged: dict[str, Any] = {}
        self._last_priorities: Any = None

    def __bool__(self) -> bool:
        return bool(self._merged)

    def add(self, info: Mapping[str, Any]) -> None:
        """Add an info; priorities that were added before are not added again."""
        priorities = info.get("priority_info") or {}
        is_new = priorities is not self._last_priorities
        self._last_priorities = priorities
        added = {key: _plain(value) for key, value in priorities.items()} if is_new else {}
        self._merged = _merged(self._merged, {**info, "priority_info": added})

    def put_back(self, info: Mapping[str, Any]) -> None:
        """Add what was taken before, as it was not sent."""
        self._merged = _merged(info, self._merged)

    def take(self) -> dict[str, Any]:
        """Return the merged info, and start again."""
        merged, self._merged = self._merged, {}
        return merged


class SendLearnInfoHook(_SendHook):
    """Sends the learner's progress to the coordinator.

    It calls the learner's ``send_learn_info`` with :attr:`BaseLearner.learn_info`. Infos between
    two sends are merged: the newest values, and all priorities, as lists.

    Args:
        args: name and priority.
        position: ``after_iter`` or ``after_run``, where ``learner_done`` is True.
        ext_args: ``freq``, in iterations (``after_iter`` only); default: 10.
        infos: shared by the hooks of one learner, so that the last one sends what is left.
        kwargs: ignored.
    """

    _key, _default = "freq", 10

    def __init__(
        self,
        *args: Any,
        position: str,
        ext_args: Mapping[str, Any] | None = None,
        infos: LearnInfos | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, position=position, ext_args=ext_args, **kwargs)
        self._infos = infos if infos is not None else LearnInfos()

    def __call__(self, engine: BaseLearner) -> None:
        """Add the learner's info; send what is merged, if an interval has passed."""
        info = {**engine.learn_info, "learner_step": finished_iterations(engine, self.position)}
        if self.position == "after_run":
            info["learner_done"] = True
        self._infos.add(info)
        if self._is_due(engine):
            sender: _Sender = engine  # type: ignore[assignment]
            sender.send_learn_info(self._infos.take())


def _merged(earlier: Mapping[str, Any], later: Mapping[str, Any]) -> dict[str, Any]:
    """Return the later values where there are any, and the priorities of both."""
    first, second = (info.get("priority_info", {}) for info in (earlier, later))
    priorities = {key: [*first.get(key, []), *second.get(key, [])] for key in {**first, **second}}
    return {**earlier, **later, "priority_info": priorities}


def _plain(value: Any) -> list[Any]:
    """Return priorities, or the positions of their rows, as a list of numbers or strings."""
    if isinstance(value, torch.Tensor | np.ndarray):
        listed: list[Any] = value.reshape(-1).tolist()
        return listed
    return [one.item() if hasattr(one, "item") else one for one in value]


register_learner_hook("send_policy", SendPolicyHook)
register_learner_hook("send_learn_info", SendLearnInfoHook)
