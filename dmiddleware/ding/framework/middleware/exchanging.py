"""Exchanges between processes, with DI-engine's arguments."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Final

from torch import nn

from dmiddleware.ding.program import policy_with
from dmiddleware.pipeline import Event, Task
from dmiddleware.pipeline.middleware import Middleware
from middleware import ContextExchanger as CoreContextExchanger
from middleware import ModelExchanger as CoreModelExchanger
from middleware import Role
from middleware.base import BaseMiddleware
from middleware.context import OnlineRLContext
from middleware.exchange.waiting import Waiting

__all__ = ["ContextExchanger", "ModelExchanger", "PeriodicalModelExchanger"]

_TIMEOUT_S: Final = 120.0


def ContextExchanger(  # noqa: N802 (DI-engine's name)
    skip_n_iter: int = 1, storage_loader: Any = None
) -> CoreContextExchanger:
    """Send what is collected to the learner, and its counters back.

    Args:
        skip_n_iter: no effect: a process waits for what it needs.
        storage_loader: no effect: large data travel in shared memory.
    """
    return CoreContextExchanger()


def ModelExchanger(  # noqa: N802 (DI-engine's name)
    model: nn.Module, model_loader: Any = None
) -> Middleware[Any]:
    """Send the learner's weights to the others.

    Args:
        model: the policy's network, or a module that no policy was built with.
        model_loader: no effect: large weights travel in shared memory.
    """
    policy = policy_with(model)
    return ModuleExchanger(model) if policy is None else CoreModelExchanger(policy)


def PeriodicalModelExchanger(  # noqa: N802 (DI-engine's name)
    model: nn.Module,
    mode: str = "send",
    period: int = 1,
    delay_toleration: float = math.inf,
    stale_toleration: int = 1,
    event_name: str = "model_exchanger",
    model_loader: Any = None,
) -> Middleware[Any]:
    """Send the learner's weights every ``period`` updates, or steps if no policy has the model."""
    policy = policy_with(model)
    if policy is None:
        return ModuleExchanger(model, event_name, period=period, max_stale=stale_toleration)
    return CoreModelExchanger(policy, every_train_iter=max(1, period))


class ModuleExchanger(BaseMiddleware[OnlineRLContext]):
    """Sends the weights of a module that belongs to no policy from the learner to the others.

    The learner sends them at the end of its first step and of every ``period``-th one after it.
    The others load the newest ones before their second step and each one after that.

    Args:
        module: the module.
        name: names the exchange, if a program has several.
        period: steps of the learner from one copy to the next.
        max_stale: steps of another process with the same weights, before it waits for new ones.
    """

    def __init__(
        self,
        module: nn.Module,
        name: str = "model_exchanger",
        *,
        period: int = 1,
        max_stale: int = 1,
    ) -> None:
        self._module = module
        self._event = Event(f"module.{name}", delivery="latest")
        self._period, self._max_stale = period, max_stale
        self._waiting: Waiting | None = None
        self._newest: dict[str, Any] | None = None
        self._stale = max_stale

    def setup(self, task: Task[Any]) -> None:
        """Receive weights, unless this process learns."""
        if task.router is not None and not task.has_role(Role.LEARNER):
            self._waiting = Waiting(task, timeout_s=_TIMEOUT_S)
            self._waiting.on(self._event, self._receive)

    def _receive(self, state: dict[str, Any]) -> None:
        self._newest = state

    def __call__(self, ctx: OnlineRLContext) -> Iterator[None]:
        """Load weights on the way forward, or send them on the way back."""
        if self._waiting is not None:
            if ctx.total_step > 0:
                self._load(self._waiting)
            return
        yield
        if ctx.task.router is not None and ctx.total_step % self._period == 0:
            ctx.task.emit(self._event, self._module.state_dict(), only_remote=True)

    def _load(self, waiting: Waiting) -> None:
        with waiting.changed:
            if self._newest is None and self._stale < self._max_stale:
                self._stale += 1
                return
            waiting.until(
                lambda: self._newest is not None,
                missing=lambda: "weights of the learner",
                awaited=lambda: waiting.task.participants(Role.LEARNER),
            )
            state, self._newest, self._stale = self._newest, None, 1
        self._module.load_state_dict(state or {})
