"""DI-engine's trainers: update the policy from what a fetcher put into the context."""

from __future__ import annotations

from collections.abc import Iterable

from dmiddleware.data import ReplayBuffer
from dmiddleware.errors import ConfigError, PolicyOutputError
from dmiddleware.pipeline import ChainView
from middleware.context import RLContext
from middleware.learn import PolicyUpdater
from middleware.support.replay import bind_to_policy, n_step_problems

__all__ = ["MultistepTrainer", "Trainer", "multistep_trainer", "trainer"]


class Trainer(PolicyUpdater[RLContext]):
    """Update the policy once from ``ctx.train_data``; do nothing in a step without data.

    Args:
        policy: a policy, or its learn mode.

    Reads:
        ctx.train_data: a batch ``[B, …]``, from a fetcher.
        ctx.train_iter: incremented.

    Writes:
        ctx.train_output: the output of the update.
        ctx.train_iter: plus one.

    Raises:
        ConfigError: if ``policy`` is not a policy.
        ChainError: before the first step, if the policy has ``nstep`` above 1, and nothing in the
            chain computes n-step returns.
        PolicyOutputError: in the first update, if the policy makes several updates from a batch.
    """

    reads = ("train_data", "train_iter")

    def bind(self, chain: ChainView) -> None:
        """Give the policy's discount to the buffers of the chain."""
        super().bind(chain)
        for buffer in _drawn_from(chain):
            if isinstance(buffer, ReplayBuffer):
                bind_to_policy(buffer, self._mode)

    def preflight(self, chain: ChainView) -> Iterable[str]:
        """Reject data whose n-step length or discount is not the policy's."""
        yield from super().preflight(chain)
        drawn = _drawn_from(chain)
        if not drawn:
            yield from n_step_problems(None, self._mode, chain)
        for buffer in drawn:
            if not isinstance(buffer, ReplayBuffer):
                continue
            try:
                bind_to_policy(buffer, self._mode)  # which compares
            except ConfigError as error:
                yield str(error)
            else:
                yield from n_step_problems(buffer, self._mode, chain)

    def __call__(self, ctx: RLContext) -> None:
        """Learn."""
        batch = ctx.train_data
        if self._all_can(update=batch is not None) and batch is not None:
            outputs = self._update(ctx, batch)
            if len(outputs) != 1:
                raise PolicyOutputError(
                    f"the policy's forward in learn mode returned {len(outputs)} outputs, but "
                    f"{type(self).__name__} makes one update in a step; use MultistepTrainer"
                )
            ctx.train_output = outputs[0]


def _drawn_from(chain: ChainView) -> list[object]:
    return [store for declares in chain.declarations for store in declares.draws_from]


class MultistepTrainer(Trainer):
    """Call a policy whose forward makes several updates from one batch.

    The forward returns a list of outputs, each of which counts as one update. In a step without
    data, nothing happens.

    Args:
        policy: a policy, or its learn mode.

    Reads:
        ctx.train_data: a batch, from a fetcher or an estimator.
        ctx.train_iter: incremented.

    Writes:
        ctx.train_output: a list with the output of each update.
        ctx.train_iter: with the updates made.

    Raises:
        ConfigError: if ``policy`` is not a policy.
    """

    def __call__(self, ctx: RLContext) -> None:
        """Learn."""
        batch = ctx.train_data
        if self._all_can(update=batch is not None) and batch is not None:
            ctx.train_output = self._update(ctx, batch)


trainer = Trainer
"""DI-engine's name of :class:`Trainer`."""

multistep_trainer = MultistepTrainer
"""DI-engine's name of :class:`MultistepTrainer`."""
