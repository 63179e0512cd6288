"""Check a replay buffer, draw batches from it and update its priorities."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import torch

from dmiddleware.data import MixedReplay, ReplayBuffer, TensorBuffer
from dmiddleware.errors import ConfigError, NotEnoughData
from dmiddleware.pipeline import ChainView, Context
from dmiddleware.policy import LearnMode, priorities_of_rows
from dmiddleware.rl import Schedule
from dmiddleware.tree import Batch
from middleware.base import stock_middleware
from middleware.context import RLContext
from middleware.support.counters import RunCounters
from middleware.support.policy_settings import setting_of

__all__ = [
    "bind_to_policy",
    "check_buffer",
    "check_start",
    "counters_for",
    "n_step_problems",
    "update_priorities",
    "EarlyReturns",
    "SkippedDraws",
]

_EARLY_ROWS: Final = 1 << 14
_RETURN_COLUMNS: Final = ("reward", "terminated", "episode_id")
_log = logging.getLogger(__name__)


def check_buffer(buffer: object) -> None:
    """Reject anything but a replay buffer.

    Raises:
        ConfigError: with the value.
    """
    if not isinstance(buffer, ReplayBuffer):
        raise ConfigError(
            f"the buffer must be a TensorBuffer, or have the interface ReplayBuffer, got "
            f"{buffer!r:.100}; wrap a DequeBuffer in dmiddleware.classic.DequeReplay"
        )


def check_start(buffer: ReplayBuffer, *, batch_size: int, learn_start: int | None) -> int:
    """Return the number of rows that the buffer must hold before the first batch is drawn.

    Raises:
        ConfigError: if it is less than a batch or more than the buffer's size.
    """
    start = batch_size if learn_start is None else learn_start
    if start < batch_size:
        raise ConfigError(f"learn_start must be at least batch_size ({batch_size}), got {start}")
    if start > buffer.size:
        name = "batch_size" if learn_start is None else "learn_start"
        raise ConfigError(
            f"{name} must be at most the buffer's size ({buffer.size}), or learning never "
            f"starts; got {start}"
        )
    return start


def counters_for(buffer: ReplayBuffer, schedules: Mapping[str, Schedule]) -> RunCounters:
    """Return the counters that schedules, also a buffer's, read from a context."""
    of_buffer = {f"{name} of the buffer": schedule for name, schedule in buffer.schedules.items()}
    return RunCounters({**schedules, **of_buffer}, always=buffer.reads_counters)


def update_priorities(buffer: ReplayBuffer, batch: Batch, outputs: list[dict[str, Any]]) -> None:
    """Write the priorities that one forward returned, if any, to the rows that they are for.

    The key ``priority`` is removed from the outputs.

    Raises:
        ConfigError: if the buffer draws by priority, but the policy returns no priorities, and
            nothing else has set any.
    """
    index = batch["index"]
    result = priorities_of_rows(outputs, len(index))
    for output in outputs:
        output.pop("priority", None)
    if result is None:
        if buffer.lacks_priorities:
            raise ConfigError(
                "the buffer draws by priority, but the policy returned no priorities, and nothing "
                "else has set any, so all draws would be uniform; draw uniformly, use a policy "
                "that returns 'priority', or set priorities with buffer.update_priority"
            )
        return
    rows, priority = result
    buffer.update_priority(index if rows is None else index[rows], priority)


def bind_to_policy(buffer: ReplayBuffer, mode: LearnMode) -> None:
    """Give a buffer what the policy knows, and compare what both of them have.

    Raises:
        ConfigError: if the buffer was built with another discount, n-step length or burn-in.
    """
    buffer.bind(
        n_step=mode.spec.n_step,
        discount=mode.spec.discount,
        burn_in=setting_of(mode, "burn_in"),
        start_columns=("state",) if "state" in mode.spec.learn_columns else (),
    )


def n_step_problems(
    buffer: ReplayBuffer | None, mode: LearnMode, chain: ChainView
) -> Iterator[str]:
    """Yield the problem of a policy for n-step returns that gets one-step transitions.

    Args:
        buffer: from where the rows are drawn; None: no buffer of the chain.
        mode: the policy's learn mode.
        chain: the chain; its middleware may compute such returns.
    """
    n_step = mode.spec.n_step
    if n_step == 1 or any(part.computes_n_step for part in stock_middleware(chain)):
        return
    if buffer is None:
        yield (
            f"the policy has n_step={n_step}, but nothing in the chain computes n-step returns; "
            "push the rows to a TensorBuffer and learn with OffPolicyLearner, or build the policy "
            "with n_step=1 (a middleware that draws from a buffer of its own declares it with "
            "draws_from)"
        )
    elif buffer.n_step not in (None, n_step):
        yield (
            f"the policy has n_step={n_step}, but the buffer has n_step={buffer.n_step}; build it "
            "without n_step, and push rows only after the learner is built"
        )


class EarlyReturns:
    """Shows a policy the discounted returns in a buffer, several times while it fills.

    So a mistake in what the policy expects of the env is found before much was learned.

    Args:
        buffer: the buffer, of whose newest rows the returns are shown.
        check: the policy's ``check_returns``.
        discount: γ.
    """

    def __init__(
        self, buffer: TensorBuffer, check: Callable[..., None], *, discount: float
    ) -> None:
        self._buffer, self._check, self._discount = buffer, check, discount
        self._next: float = 0
        """How many rows the buffer must hold when the policy sees the returns again."""

    @classmethod
    def of(cls, buffer: ReplayBuffer, mode: LearnMode) -> EarlyReturns | None:
        """Return those of a policy; None if it checks none, or the buffer does not know them."""
        check, discount = mode.spec.check_returns, mode.spec.discount
        if isinstance(buffer, MixedReplay):
            buffer = buffer.own
        if check is None or discount is None or not isinstance(buffer, TensorBuffer):
            return None
        return cls(buffer, check, discount=discount)

    def show(self, ctx: RLContext) -> None:
        """Call the policy's ``check_returns`` if the buffer has twice as many rows as before.

        Raises:
            ConfigError: from the policy.
        """
        buffer = self._buffer
        if len(buffer) < self._next:
            return
        was_resumed = self._next == 0 and ctx.train_iter > 0
        is_late = was_resumed or len(buffer) >= _EARLY_ROWS
        self._next = math.inf if is_late else 2 * len(buffer)
        if was_resumed:
            return
        try:
            rows = buffer.get(buffer.index[-_EARLY_ROWS:], _RETURN_COLUMNS)
        except KeyError:  # rows of no env
            return
        if rows["reward"].dim() == 1:
            self._check(*_known_returns(rows, self._discount), rows["reward"])


def _known_returns(rows: Batch, discount: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the discounted sums of rewards to the end of each row's episode, as far as it is held.

    Args:
        rows: ``[N, …]``, those of an episode in their order.
        discount: γ.

    Returns:
        ``[N]`` float64: the sums, and the discount of what follows; 0 where the episode terminated.
    """
    sums: list[float] = []
    rests: list[float] = []
    later: dict[int, tuple[float, float]] = {}
    columns = (rows[name].tolist() for name in _RETURN_COLUMNS)
    for reward, terminated, episode in reversed(list(zip(*columns, strict=True))):
        total, rest = later.get(episode, (0.0, 0.0 if terminated else 1.0))
        later[episode] = total, rest = reward + discount * total, discount * rest
        sums.append(total)
        rests.append(rest)
    return torch.tensor(sums, dtype=torch.float64), torch.tensor(rests, dtype=torch.float64)


class SkippedDraws:
    """Counts the draws for which a buffer had too few rows, and warns at 1, 2, 4, 8, … of them."""

    def __init__(self) -> None:
        self.count = 0

    def add(self, ctx: Context, error: NotEnoughData) -> None:
        """Count one; the total is logged as ``learn/skipped_draws``."""
        self.count += 1
        ctx.log("learn/skipped_draws", self.count)
        if self.count & (self.count - 1) == 0:
            _log.warning("skipped %d update(s) so far, because %s", self.count, error)
