"""Learning: the policy is updated from data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch

from dmiddleware.data import Batch, flatten_lead, index_rows
from dmiddleware.errors import ConfigError
from dmiddleware.pipeline import Middleware, Role, Task
from dmiddleware.policy import LearnMode, is_update, update_outputs
from dmiddleware.worker import BaseLearner
from middleware.support.checks import check_positive
from middleware.support.replay import (
    ReplayBuffer,
    check_buffer,
    check_start,
    count_drawn,
    draw,
    give_back,
)

__all__ = ["OffPolicyLearner", "OnPolicyLearner", "trainer", "multistep_trainer"]

Learner: TypeAlias = LearnMode | BaseLearner
"""What updates a policy: its learn mode alone, or a learner, with its hooks around each update."""


class _LearnerMiddleware:
    """Base of all that learns: updates through a learn mode or a learner, and the run's hooks."""

    roles = (Role.LEARNER,)
    writes = ("train_output", "train_iter")

    def __init__(self, learner: Learner) -> None:
        self._learner = learner
        self._forward: Callable[[Any], Any]
        if isinstance(learner, BaseLearner):
            self._forward = self._train
        elif isinstance(learner, LearnMode):
            self._forward = learner.forward
        else:
            raise ConfigError(
                f"{type(self).__name__} learns through a policy's learn mode (policy.learn_mode) "
                f"or a BaseLearner, got {learner!r:.100}"
            )
        self._env_step = -1
        self._running = False

    def setup(self, task: Task[Any]) -> None:
        """Run the learner's hooks of ``before_run``; go on counting from what one of them loads."""
        if not isinstance(self._learner, BaseLearner) or self._running:
            return
        self._learner.call_hook("before_run")
        self._running = True
        if self._learner.train_iter > task.ctx.train_iter:
            task.ctx.train_iter = self._learner.train_iter

    def close(self) -> None:
        """Run the learner's hooks of ``after_run``, also after an error."""
        if isinstance(self._learner, BaseLearner) and self._running:
            self._running = False
            self._learner.call_hook("after_run")

    def _update(self, ctx: Any, batch: Batch) -> list[dict[str, Any]]:
        """Make one call of the policy's forward; each of a list of outputs counts as an update."""
        self._env_step = getattr(ctx, "env_step", -1)
        outputs = update_outputs(self._forward(batch))
        ctx.train_iter += sum(map(is_update, outputs))
        return outputs

    def _train(self, batch: Batch) -> Any:
        assert isinstance(self._learner, BaseLearner)
        return self._learner.train(batch, envstep=self._env_step)


class OffPolicyLearner(_LearnerMiddleware):
    """Update the policy from batches that a buffer draws.

    Nothing happens until the buffer holds enough. Priorities that the policy returns go back to the
    buffer.

    Args:
        learner: a policy's learn mode, or a learner with hooks.
        buffer: where batches come from.
        batch_size: rows in a batch.
        updates_per_collect: updates in each step of the task.
        learn_start: rows that the buffer must hold before the first update; at least, and by
            default, ``batch_size``.
        tell_train_iter: tell the buffer the iteration with each sample, as ``staleness_check``
            needs it.

    Reads:
        ctx.train_iter: counted on.

    Writes:
        ctx.train_output: a list of what each update reported; None while the buffer fills, or an
            exchange holds learning because it is ahead of its pace.
        ctx.train_iter: with the updates made.
        ctx.trained_env_step: with the rows drawn, if someone counts them.

    Raises:
        ConfigError: if ``learner`` or ``buffer`` is something else.
        ValueError: if a number is not positive, ``learn_start`` less than ``batch_size``, or more
            than the buffer ever holds.
        NonFiniteLoss: from the policy; the parameters are those from before the update.
    """

    reads = ("train_iter",)

    def __init__(
        self,
        learner: Learner,
        buffer: ReplayBuffer,
        *,
        batch_size: int,
        updates_per_collect: int = 1,
        learn_start: int | None = None,
        tell_train_iter: bool = False,
    ) -> None:
        super().__init__(learner)
        check_buffer(buffer)
        check_positive(batch_size=batch_size, updates_per_collect=updates_per_collect)
        self._buffer = buffer
        self._batch_size = batch_size
        self._n_updates = updates_per_collect
        self._learn_start = check_start(buffer, batch_size=batch_size, learn_start=learn_start)
        self._tell_train_iter = tell_train_iter

    def __call__(self, ctx: Any) -> None:
        """Learn."""
        buffer, batch_size = self._buffer, self._batch_size
        if len(buffer) < self._learn_start or getattr(ctx, "learning_held", False):
            return
        outputs: list[dict[str, Any]] = []
        for _ in range(self._n_updates):
            told = ctx.train_iter if self._tell_train_iter else None
            batch, index = draw(buffer, batch_size, train_iter=told)
            answer = self._update(ctx, batch)
            give_back(buffer, index, answer)
            outputs += answer
        count_drawn(ctx, self._n_updates * batch_size)
        ctx.train_output = outputs


class OnPolicyLearner(_LearnerMiddleware):
    """Update the policy from all of ``ctx.train_data``, in minibatches, for several epochs.

    The minibatches of an epoch are a random partition of the rows into parts that are all of one
    size, up to one row, and not smaller than ``batch_size`` (unless there are fewer rows at all).
    When the policy answers that it has moved too far from the one that collected (``kl_stop``), the
    rest of the epochs is left out.

    Args:
        learner: a policy's learn mode, or a learner with hooks.
        batch_size: rows in a minibatch.
        epochs: passes over the data in each step of the task.

    Reads:
        ctx.train_data: a batch ``[N, …]`` or ``[T, E, …]``, used once.
        ctx.train_iter: counted on.

    Writes:
        ctx.train_output: a list of what each update reported.
        ctx.train_iter: with the updates made.

    Raises:
        ValueError: if a number is not positive.
        NonFiniteLoss: from the policy; the parameters are those from before the update.
    """

    reads = ("train_data", "train_iter")

    def __init__(
        self,
        learner: Learner,
        *,
        batch_size: int,
        epochs: int,
    ) -> None:
        super().__init__(learner)
        check_positive(batch_size=batch_size, epochs=epochs)
        self._batch_size = batch_size
        self._epochs = epochs
        self._generator = torch.Generator()

    def setup(self, task: Task[Any]) -> None:
        """Seed the order of the minibatches from the task's seed."""
        super().setup(task)
        self._generator.manual_seed(task.seed_for("learner", "minibatches"))

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the generator that orders the minibatches."""
        return {"generator": self._generator.get_state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        self._generator.set_state(state["generator"])

    def __call__(self, ctx: Any) -> None:
        """Learn."""
        data = ctx.train_data
        if data["done"].dim() == 2:
            data = flatten_lead(data, 2)
        ctx.train_output = []
        for _ in range(self._epochs):
            if not self._one_epoch(ctx, data):
                break

    def _one_epoch(self, ctx: Any, data: Batch) -> bool:
        """Learn from all rows once; return whether to go on."""
        n_rows = data["done"].shape[0]
        order = torch.randperm(n_rows, generator=self._generator)
        for rows in order.tensor_split(max(1, n_rows // self._batch_size)):
            for output in self._update(ctx, index_rows(data, rows)):
                ctx.train_output.append(output)
                if output.get("kl_stop"):
                    return False
        return True


class _Trainer(_LearnerMiddleware):
    """Update the policy once from ``ctx.train_data``; see :func:`trainer`."""

    __name__ = "trainer"
    reads = ("train_data", "train_iter")

    def __call__(self, ctx: Any) -> None:
        if ctx.train_data is None:
            return
        (ctx.train_output,) = self._update(ctx, ctx.train_data)


class _MultistepTrainer(_LearnerMiddleware):
    """Let the policy update itself several times; see :func:`multistep_trainer`."""

    __name__ = "multistep_trainer"
    reads = ("train_data", "train_iter")

    def __call__(self, ctx: Any) -> None:
        if ctx.train_data is None:
            return
        ctx.train_output = self._update(ctx, ctx.train_data)


def trainer(learner: Learner) -> Middleware[Any]:
    """Update the policy once from ``ctx.train_data``; without data in a step, do nothing.

    Args:
        learner: a policy's learn mode, or a learner with hooks.

    Reads:
        ctx.train_data: a batch ``[B, …]``, from a fetcher.
        ctx.train_iter: counted on.

    Writes:
        ctx.train_output: what the update reported.
        ctx.train_iter: plus one.
    """
    return _Trainer(learner)


def multistep_trainer(learner: Learner) -> Middleware[Any]:
    """Call a policy whose forward makes several updates from one batch.

    Such a forward returns a list of outputs, each of which counts as one update. Without data in a
    step, do nothing.

    Args:
        learner: a policy's learn mode, or a learner with hooks.

    Reads:
        ctx.train_data: a batch, from a fetcher or an estimator.
        ctx.train_iter: counted on.

    Writes:
        ctx.train_output: a list of what each update reported.
        ctx.train_iter: with the updates made.
    """
    return _MultistepTrainer(learner)
