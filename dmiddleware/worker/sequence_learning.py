"""Learning from sequences in a run in the classic shape, whose collectors return transitions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from easydict import EasyDict

from dmiddleware.classic.modes import spec_attribute
from dmiddleware.data import PrioritySampler, TensorBuffer
from dmiddleware.errors import NotEnoughData
from dmiddleware.tree import as_tree, stack
from dmiddleware.worker.collector import ISerialCollector
from dmiddleware.worker.learner import BaseLearner

__all__ = ["LaneReplay", "SequenceReplay", "sequence_length"]


def sequence_length(policy: Mapping[str, Any]) -> int:
    """Return how many steps of a sequence an algorithm learns from.

    Args:
        policy: the policy's config, with ``learn_unroll_len``, ``unroll_len`` or
            ``collect.unroll_len``, of which the first one counts.
    """
    collect = policy.get("collect", {})
    lengths = (policy.get("learn_unroll_len"), policy.get("unroll_len"), collect.get("unroll_len"))
    return int(next(filter(None, lengths), 1))


class SequenceReplay:
    """Learns from sequences of one episode each, drawn from a replay buffer, as R2D2 does.

    ``other.replay_buffer.replay_buffer_size`` counts sequences, as in DI-engine.

    Args:
        cfg: the whole config.
        learner: trains the policy.
        seed: of the buffer.
    """

    def __init__(self, cfg: EasyDict, learner: BaseLearner, seed: int) -> None:
        spec = learner.policy.spec
        replay = cfg.policy.other.replay_buffer
        length = sequence_length(cfg.policy)
        burn_in = int(cfg.policy.get("burn_in", 0))
        self._is_prioritized = bool(cfg.policy.get("priority", False))
        sampler = None
        if self._is_prioritized:
            sampler = PrioritySampler(alpha=replay.get("alpha", 0.6), beta=replay.get("beta", 0.4))
        self._buffer = TensorBuffer(
            int(replay.replay_buffer_size) * (burn_in + length),
            sampler=sampler,
            unroll_len=length,
            stride=length,
            store_next_obs=False,
            seed=seed,
        )
        self._buffer.bind(
            n_step=spec.n_step, discount=spec.discount, burn_in=burn_in, start_columns=("state",)
        )
        self._learner = learner
        self._batch_size = int(spec_attribute(spec, "batch_size"))
        self._n_updates = int(cfg.policy.learn.get("update_per_collect", 1))
        self._n_random = length * int(cfg.policy.get("random_collect_size", 0))

    def begin(self, collector: ISerialCollector[Any, Any]) -> None:
        """Fill the buffer with what random actions collect."""
        if self._n_random > 0:
            self._buffer.push(collector.collect(self._n_random, random_collect=True))

    def from_collected(self, data: list[Any], envstep: int) -> None:
        """Push the data, and update the policy."""
        self._buffer.push(data)
        for _ in range(self._n_updates):
            try:
                batch = self._buffer.sample(self._batch_size)
            except NotEnoughData:
                return
            self._learner.train(batch, envstep)
            if self._is_prioritized:
                info = self._learner.priority_info
                self._buffer.update_priority(info["index"], info["priority"])


class LaneReplay:
    """Learns from lanes, sequences that may contain ends of episodes, as IMPALA does.

    ``other.replay_buffer.replay_buffer_size`` and ``learn.batch_size`` count lanes, as in
    DI-engine. A lane that ``max_use`` batches of the buffer's config have had is dropped.

    Args:
        cfg: the whole config.
        learner: trains the policy.
        seed: of the order in which lanes are drawn.
    """

    def __init__(self, cfg: EasyDict, learner: BaseLearner, seed: int) -> None:
        self._length = sequence_length(cfg.policy)
        self._size = int(cfg.policy.other.replay_buffer.replay_buffer_size)
        self._learner = learner
        self._batch_size = int(cfg.policy.learn.batch_size)
        self._n_updates = int(cfg.policy.learn.get("update_per_collect", 1))
        self._generator = torch.Generator().manual_seed(seed)
        self._max_use = cfg.policy.other.replay_buffer.get("max_use") or math.inf
        self._rest: list[Any] = []
        self._lanes: list[_Lane] = []

    def begin(self, collector: ISerialCollector[Any, Any]) -> None:
        """Do nothing: actions that the policy did not choose have no probability."""

    def from_collected(self, data: list[Any], envstep: int) -> None:
        """Add the data to the lanes, and update the policy."""
        rows, length = [*self._rest, *data], self._length
        n_lanes = len(rows) // length
        self._lanes += [_Lane(rows[i * length : (i + 1) * length]) for i in range(n_lanes)]
        self._rest = rows[n_lanes * length :]
        del self._lanes[: -self._size]
        for _ in range(self._n_updates):
            if len(self._lanes) < self._batch_size:
                return
            order = torch.randperm(len(self._lanes), generator=self._generator)
            drawn = [self._lanes[i] for i in order[: self._batch_size].tolist()]
            for lane in drawn:
                lane.n_uses += 1
            self._lanes = [lane for lane in self._lanes if lane.n_uses < self._max_use]
            lanes = [stack([as_tree(row) for row in lane.rows]) for lane in drawn]
            self._learner.train(stack(lanes, 1), envstep)


@dataclass
class _Lane:
    rows: list[Any]
    n_uses: int = 0
