"""The events by which the processes of a run exchange data, and the counters that they carry."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, TypeAlias

from dmiddleware.pipeline import Event

__all__ = [
    "BATCH",
    "CONSUMED",
    "EVALUATED",
    "EVALUATION",
    "LEARNED",
    "MODEL",
    "REACHED",
    "UPDATED",
    "WAITING",
    "WAITS",
    "Counters",
    "collected_event",
    "curriculum_event",
    "merge_counters",
]

# From collectors and evaluators to the learner.

EVALUATED: Final = Event("exchange.evaluated", timeout_s=120.0)
"""The fields :data:`EVALUATION` of an evaluator's context."""

WAITING: Final = Event("exchange.waiting", timeout_s=120.0)
"""From a node that waits for further updates: its node id, and the updates that it knows."""

# From the learner to the others.

LEARNED: Final = Event("exchange.learned", delivery="latest")
"""The learner's counters: when it starts, when a node joins, and to nodes that wait for them."""

CONSUMED: Final = Event("exchange.consumed", timeout_s=120.0)
"""To the sender of a batch: its token, the batch's number, and the learner's counters."""

MODEL: Final = Event("exchange.model", delivery="latest")
"""The learner's counters and weights."""

# Within a process.

UPDATED: Final = Event("exchange.updated", delivery="latest")
"""The counters with which weights have arrived."""

# Between all processes.

REACHED: Final = Event("exchange.barrier", timeout_s=120.0)
"""The name of a barrier, the node that sends it, and how often a node has reached the barrier."""

WAITS: Final = Event("exchange.waits", delivery="lossy")
"""From a node that has waited for a while: its node id, and the nodes that it waits for."""

BATCH: Final = ("trajectories", "trajectory_end_idx", "episodes")
"""The fields of a collector's context that go to the learner."""

EVALUATION: Final = ("eval_value", "eval_output", "last_eval_iter", "last_eval_value")
"""The fields of an evaluator's context that go to the learner."""

Counters: TypeAlias = Mapping[str, int]
"""``env_step``, ``env_episode`` and ``train_iter`` of the learner, its ``epoch`` and ``ranks``.

A learner that is restarted has a larger epoch than any before it: the incarnation of its router, on
which its peers agree.
"""


def collected_event(rank: int, n_ranks: int) -> Event:
    """Return the event by which batches go to one rank of the learner."""
    # A joining collector may be connected to some of several ranks only.
    return Event(f"exchange.collected.{rank}", timeout_s=120.0, required=n_ranks > 1)


def curriculum_event(name: str) -> Event:
    """Return the event by which the learner sends the values of a curriculum to the others."""
    return Event(f"exchange.curriculum.{name}", delivery="latest")


def merge_counters(known: Counters | None, new: Counters) -> Counters:
    """Return the newest counters; those of an earlier learner are ignored."""
    if known is None or new["epoch"] > known["epoch"]:
        return new
    if new["epoch"] < known["epoch"]:
        return known
    # They arrive over several streams, so older ones may arrive later.
    return {name: max(value, new[name]) for name, value in known.items()}
