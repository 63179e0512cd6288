"""Minibatches of images.

One PPO learning step on [128, 8] rows of 84x84x4 uint8: 4 epochs of 16 minibatches, without the
updates themselves. The reference gathers every column of each minibatch with ``index_rows``, as
``OnPolicyLearner`` did before it gathered only what the policy learns from.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from dmiddleware.data import Batch, as_tree, flatten_lead, index_rows, leaves
from dmiddleware.policy import PPOPolicy
from middleware import OnlineRLContext, OnPolicyLearner
from tests.benchmarks.report import Row, interleaved

T, E = 128, 8
IMAGE = (84, 84, 4)
N_ACTIONS = 6
EPOCHS, BATCH_SIZE = 4, 64
AT_MOST = 0.5


def _collected() -> Batch:
    """Return what a collector and an advantage estimator give."""
    generator = torch.Generator().manual_seed(0)
    lead, no = (T, E), torch.zeros(T, E, dtype=torch.bool)
    images = torch.randint(256, (2, *lead, *IMAGE), generator=generator, dtype=torch.uint8)
    numbers = ("reward", "log_prob", "value", "adv", "ret")
    return as_tree(
        {
            "obs": images[0],
            "next_obs": images[1],
            "action": torch.randint(N_ACTIONS, lead, generator=generator),
            "logit": torch.randn(*lead, N_ACTIONS, generator=generator),
            "done": no,
            "terminated": no.clone(),
            "truncated": no.clone(),
            "episode_id": torch.arange(E).repeat(T, 1),
            "collect_iter": torch.zeros(lead, dtype=torch.int64),
            **{name: torch.randn(lead, generator=generator) for name in numbers},
        }
    )


class _Taken:
    """Takes minibatches as a policy does, and counts their bytes."""

    def __init__(self) -> None:
        self.n_bytes = 0

    def __call__(self, batch: Batch) -> dict[str, Any]:
        self.n_bytes += sum(leaf.nbytes for _, leaf in leaves(batch))
        return {}


def rows() -> list[Row]:
    """Measure bytes and time."""
    data = _collected()
    model = {"obs_shape": [4, 84, 84], "action_shape": N_ACTIONS}
    policy = PPOPolicy({"model": model, "batch_size": BATCH_SIZE, "epoch_per_collect": EPOCHS})
    ours_taken, reference_taken = _Taken(), _Taken()
    learner = OnPolicyLearner(dataclasses.replace(policy.learn_mode, forward=ours_taken))
    generator = torch.Generator().manual_seed(0)

    def ours() -> None:
        ours_taken.n_bytes = 0
        ctx = OnlineRLContext()
        ctx.train_data = data
        learner(ctx)

    def every_column() -> None:
        reference_taken.n_bytes = 0
        flat = flatten_lead(data, 2)
        for _ in range(EPOCHS):
            order = torch.randperm(T * E, generator=generator)
            for part in order.tensor_split(T * E // BATCH_SIZE):
                reference_taken(index_rows(flat, part))

    pair = interleaved(ours, every_column)
    n = EPOCHS * T * E // BATCH_SIZE
    name, against = "minibatch of 64 images", "every column, index_rows"
    size = Row(
        name=f"{name}, bytes",
        against=against,
        ours=ours_taken.n_bytes / n / 1e6,
        reference=reference_taken.n_bytes / n / 1e6,
        ratio=ours_taken.n_bytes / reference_taken.n_bytes,
        unit="MB",
        at_most=AT_MOST,
    )
    return [Row.of_time(f"{name}, time", pair, calls=n, against=against, at_most=AT_MOST), size]
