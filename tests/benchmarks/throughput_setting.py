"""What all sides of the throughput benchmark share: the training setup, and how a rate is measured.

PPO on CartPole-v1. It imports the standard library only, because the other libraries run in
environments of their own. The variable ``THROUGHPUT_COLLECTORS`` says how many processes collect;
0 means that one process does everything.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

ENV = "CartPole-v1"
ENV_NUM = 32  # over all processes
BATCH_SIZE = 1024  # env steps per batch: 32 of each environment
MINIBATCH_SIZE = 256
EPOCHS = 4
HIDDEN_SIZES = (64, 64)  # tanh, shared by actor and critic
LEARNING_RATE = 3e-4
DISCOUNT = 0.99
GAE_LAMBDA = 0.95
CLIP_RATIO = 0.2
VALUE_WEIGHT = 0.5
ENTROPY_WEIGHT = 0.01
GRAD_CLIP_NORM = 0.5

COLLECTORS = "THROUGHPUT_COLLECTORS"
WARMUP_S = "THROUGHPUT_WARMUP_S"
SECONDS = "THROUGHPUT_SECONDS"


def n_collectors() -> int:
    """Return how many processes collect; 0: one process does everything."""
    return int(os.environ[COLLECTORS])


def envs_per_process() -> int:
    """Return how many environments each process that collects steps."""
    return ENV_NUM // max(1, n_collectors())


class Meter:
    """Measures how many env steps a run learns from in a second, once it is warm.

    Args:
        warmup_s: seconds between the first batch and the start of the measurement.
        seconds: duration of the measurement.
        clock: returns the time in seconds.
    """

    def __init__(
        self, warmup_s: float, seconds: float, *, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._warmup_s = warmup_s
        self._seconds = seconds
        self._clock = clock
        self._first_s: float | None = None
        self._began: tuple[float, int] | None = None

    @classmethod
    def from_environment(cls) -> Meter:
        """Make a meter with the durations that the benchmark has chosen."""
        return cls(float(os.environ[WARMUP_S]), float(os.environ[SECONDS]))

    def rate(self, env_steps: int) -> float | None:
        """Return the rate in env steps per second; None before the end of the measurement.

        Call it after each batch.

        Args:
            env_steps: how many have been learned from since the start of the run.
        """
        now = self._clock()
        if self._first_s is None:
            self._first_s = now
        if self._began is None:
            if now - self._first_s >= self._warmup_s:
                self._began = now, env_steps
            return None
        began_s, before = self._began
        if now - began_s < self._seconds:
            return None
        return (env_steps - before) / (now - began_s)


def print_rate(rate: float) -> None:
    """Print the rate for the benchmark to read."""
    print(f"rate {rate:.1f}", flush=True)
