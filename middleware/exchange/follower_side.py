"""The side of collectors and evaluators in exchanging data: sends theirs, and takes counters."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping
from typing import Any

from dmiddleware.pipeline import Task
from middleware.context import OnlineRLContext
from middleware.exchange.events import (
    BATCH,
    CONSUMED,
    EVALUATED,
    EVALUATION,
    LEARNED,
    UPDATED,
    WAITING,
    Counters,
    collected_event,
    merge_counters,
)
from middleware.exchange.waiting import Exchange
from middleware.roles import Role

__all__ = ["FollowerSide"]


class FollowerSide(Exchange[OnlineRLContext]):
    """The part of a :class:`ContextExchanger` in a process that collects or evaluates.

    Args:
        max_ahead: how many batches it may send before the learner has taken them.
        timeout_s: how long to wait while no learner can answer.
    """

    def __init__(self, *, max_ahead: int, timeout_s: float) -> None:
        super().__init__(timeout_s=timeout_s)
        self._max_ahead = max_ahead
        # Identifies this process among those that have the same node id one after the other.
        self._token = secrets.token_hex(8)
        self._learned: Counters | None = None
        self._gets_weights = False
        self._sent = 0
        self._consumed = 0
        self._last = (0, -1)

    def __call__(self, ctx: OnlineRLContext) -> Iterator[None]:
        """Receive on the way forward, and send on the way back."""
        task = ctx.task
        collects = task.has_role(Role.COLLECTOR)
        if not collects:
            self._ask_for_updates(task)
        with self._changed:
            blocked_s = self._wait(
                self._has_room if collects else self._has_new_updates,
                self._what_is_missing if collects else lambda: "updates of the learner",
                lambda: task.participants(Role.LEARNER),
            )
            learned = self._learned
        assert learned is not None
        ctx.log("exchange/blocked_s", blocked_s)
        self._last = learned["epoch"], learned["train_iter"]
        # The counters of this process lack the steps of other collectors, and those of the learner
        # lack the steps in transit. The larger ones are closer to the truth.
        env_step = ctx.env_step = max(ctx.env_step, learned["env_step"])
        env_episode = ctx.env_episode = max(ctx.env_episode, learned["env_episode"])
        yield
        if collects:
            self._send_collected(ctx, task, ctx.env_step - env_step, ctx.env_episode - env_episode)
        if ctx.eval_value is not None and task.has_role(Role.EVALUATOR):
            self._send_evaluated(ctx, task)

    def _subscribe(self, task: Task[Any]) -> None:
        task.on(LEARNED, self._handler(self._on_learned))
        task.on(UPDATED, self._handler(self._on_updated))
        task.on(CONSUMED, self._handler(self._on_consumed))

    def _ask_for_updates(self, task: Task[Any]) -> None:
        """Ask for the counters after the next update, unless they arrive with the weights."""
        with self._changed:
            needs_updates = self._learned is not None and not self._has_new_updates()
        if needs_updates and not self._gets_weights:
            task.emit(WAITING, self._router.node_id, self._last[1], only_remote=True)

    def _on_updated(self, counters: Counters) -> None:
        self._gets_weights = True
        self._on_learned(counters)

    def _on_learned(self, counters: Counters) -> None:
        known, self._learned = self._learned, merge_counters(self._learned, counters)
        if known is not None and known["epoch"] < self._learned["epoch"]:
            # A new learner does not have the batches that its predecessor had not taken.
            self._consumed = self._sent

    def _on_consumed(self, token: str, number: int, counters: Counters) -> None:
        self._on_learned(counters)
        if token == self._token:
            self._consumed = max(self._consumed, number)

    def _has_room(self) -> bool:
        return self._learned is not None and self._sent - self._consumed < self._max_ahead

    def _has_new_updates(self) -> bool:
        learned = self._learned
        return learned is not None and (learned["epoch"], learned["train_iter"]) != self._last

    def _what_is_missing(self) -> str:
        if self._learned is None:
            return "the first counters of the learner"
        return (
            "an acknowledgment from the learner (it has taken "
            f"{self._consumed} of the {self._sent} batches of this collector)"
        )

    def _send_collected(
        self, ctx: OnlineRLContext, task: Task[Any], env_step: int, env_episode: int
    ) -> None:
        if ctx.trajectories is None and ctx.episodes is None:
            return
        self._sent += 1
        batch = {
            "node_id": self._router.node_id,
            "token": self._token,
            "number": self._sent,
            "env_step": env_step,
            "env_episode": env_episode,
            "train_iter": ctx.train_iter,
            "logged": dict(ctx.logged),
            **{name: getattr(ctx, name) for name in BATCH},
        }
        assert self._learned is not None
        n_ranks = self._learned["ranks"]
        # This collector's number among those of its launcher.
        number = None if self._node is None else self._node.role_index
        rank = (self._router.node_id if number is None else number) % n_ranks
        task.emit(collected_event(rank, n_ranks), batch, only_remote=True)

    def _send_evaluated(self, ctx: OnlineRLContext, task: Task[Any]) -> None:
        evaluation = {name: getattr(ctx, name) for name in EVALUATION}
        if isinstance(ctx.eval_output, Mapping | None):
            evaluation["eval_output"] = {**(ctx.eval_output or {}), "node_id": self._router.node_id}
        task.emit(EVALUATED, evaluation, only_remote=True)
