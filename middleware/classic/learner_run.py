"""A learner with hooks in a chain of middleware."""

from __future__ import annotations

from typing import Any

from dmiddleware.pipeline import Task
from dmiddleware.policy import LearnMode
from dmiddleware.worker import BaseLearner
from middleware.base import BaseMiddleware
from middleware.context import OnlineRLContext, RLContext
from middleware.roles import Role

__all__ = ["LearnerRun"]


class LearnerRun(BaseMiddleware[RLContext]):
    """Call the hooks of a learner around the updates of a chain, and around its run.

    Use it after the collector; the middleware that learns takes it in place of the policy::

        run = LearnerRun(learner)
        task.use(run).use(OffPolicyLearner(run, buffer))

    The run continues from the iteration of a checkpoint that a hook of ``before_run`` loads. The
    hooks of ``after_run`` are called after an error too.

    Args:
        learner: the learner; its policy is the one that learns.

    Attributes:
        learn_mode: the policy's learn mode, whose forward is ``learner.train``.

    Reads:
        ctx.env_step: env steps collected so far, which hooks see.
    """

    roles = (Role.LEARNER,)

    def __init__(self, learner: BaseLearner) -> None:
        self._learner = learner
        self._env_step = -1
        self._running = False
        self.learn_mode = LearnMode(
            lambda batch: learner.train(batch, envstep=self._env_step),
            learner.state_dict,
            learner.load_state_dict,
            learner.policy.spec,
        )

    def setup(self, task: Task[Any]) -> None:
        """Call the hooks of ``before_run``; continue from the iteration that they load."""
        if self._running:
            return
        self._learner.call_hook("before_run")
        self._running = True
        task.ctx.train_iter = max(task.ctx.train_iter, self._learner.train_iter)

    def close(self) -> None:
        """Call the hooks of ``after_run``."""
        if self._running:
            self._running = False
            self._learner.call_hook("after_run")

    def __call__(self, ctx: RLContext) -> None:
        """Note how many env steps have been collected."""
        self._env_step = ctx.env_step if isinstance(ctx, OnlineRLContext) else -1
