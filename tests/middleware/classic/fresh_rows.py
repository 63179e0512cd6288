"""A deque buffer that drops rows which are too old."""

from __future__ import annotations

from dmiddleware.classic import DequeBuffer, DequeReplay
from dmiddleware.classic.buffer_middleware import staleness_check
from tests.middleware.small_dqn import transitions

__all__ = ["fresh"]


def fresh(n: int) -> DequeReplay:
    """Return a replay of ``n`` rows, which are dropped after five updates."""
    buffer = DequeBuffer(1000, seed=0)
    buffer.use(staleness_check(buffer, max_staleness=5))
    replay = DequeReplay(buffer, pass_train_iter=True)
    replay.push(transitions(n))
    return replay
