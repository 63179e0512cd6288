"""DQN training.

Both sides train on CartPole-v1 with 8 environments, a Q-network with hidden layers of 128, 128 and
64, and 5 updates of 64 rows after each step of all environments. Ours is a chain of stock
middleware: explore, collect, push, learn. The reference is a hand-written loop with preallocated
arrays, one forward for all environments and fused Adam (`tests/benchmarks/hand_written.py`).
"""

from __future__ import annotations

from tests.benchmarks import setting as S
from tests.benchmarks.hand_written import HandWrittenDQN
from tests.benchmarks.ours import ChainDQN
from tests.benchmarks.report import Row, interleaved

STEPS = 60
REPEATS = 15


def rows() -> list[Row]:
    """Measure updates per second."""
    with ChainDQN() as chain, HandWrittenDQN() as loop:
        before = chain.updates, loop.updates
        pair = interleaved(lambda: chain.run(STEPS), lambda: loop.run(STEPS), repeats=REPEATS)
        if chain.updates - before[0] != loop.updates - before[1]:
            raise RuntimeError(
                f"the two sides made {chain.updates} and {loop.updates} updates; they must be equal"
            )
    return [
        Row.of_rate(
            "DQN chain, 8 CartPole envs",
            pair,
            count=STEPS * S.UPDATES_PER_STEP,
            unit="updates/s",
            against="hand-written loop",
            at_least=0.95,
        )
    ]
