"""The table of all events by which the processes of a run exchange data, and what they carry."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, NotRequired, TypeAlias, TypedDict

from dmiddleware.pipeline import Event

__all__ = [
    "BATCH",
    "CONSUMED",
    "EVALUATED",
    "EVALUATION",
    "EVENTS",
    "LEARNED",
    "MODEL",
    "REACHED",
    "UPDATED",
    "UPDATES_WANTED",
    "WAITS",
    "Batch",
    "Counters",
    "Evaluation",
    "ExchangeEvent",
    "collected_event",
    "curriculum_event",
    "events_table",
    "merge_counters",
    "of_part",
]

BATCH: Final = ("trajectories", "trajectory_end_idx", "episodes")
"""The fields of a collector's context that go to the learner."""

EVALUATION: Final = (
    "eval_value", "eval_output", "last_eval_iter", "last_eval_value", "other_evaluations",
)  # fmt: skip
"""The fields of an evaluator's context that go to the learner."""

Counters: TypeAlias = Mapping[str, int]
"""``env_step``, ``env_episode`` and ``train_iter`` of the learner, its ``epoch`` and ``ranks``.

A learner that is restarted has a larger epoch than any before it: the incarnation of its router, on
which its peers agree.
"""


class Batch(TypedDict):
    """What a collector has collected in a step.

    ``token`` and ``number`` identify it in the collector's window. ``env_step`` and ``env_episode``
    count what is new in it, ``train_iter`` is the version of the weights that collected it, and
    ``logged`` are the collector's measurements. The others are the fields :data:`BATCH`.
    """

    node_id: int
    token: str
    number: int
    env_step: int
    env_episode: int
    train_iter: int
    logged: dict[str, float]
    trajectories: Any
    trajectory_end_idx: Any
    episodes: Any


class Evaluation(TypedDict):
    """The fields :data:`EVALUATION` of an evaluator's context.

    ``eval_value`` is None if the primary evaluator has not evaluated in this step.
    """

    eval_value: float | None
    eval_output: Any
    last_eval_iter: int
    last_eval_value: float
    other_evaluations: NotRequired[dict[str, Any]]


EVALUATED: Final = Event("exchange.evaluated", timeout_s=120.0)
LEARNED: Final = Event("exchange.learned", delivery="latest")
CONSUMED: Final = Event("exchange.consumed", timeout_s=120.0)
UPDATES_WANTED: Final = Event("exchange.updates_wanted", timeout_s=120.0)
MODEL: Final = Event("exchange.model", delivery="latest")
UPDATED: Final = Event("exchange.updated", delivery="latest")
REACHED: Final = Event("exchange.barrier", timeout_s=120.0)
WAITS: Final = Event("exchange.waits", delivery="lossy")


def collected_event(rank: int | str, n_ranks: int) -> Event:
    """Return the event by which batches go to one rank of the learner."""
    # A joining collector may be connected to some of several ranks only.
    return Event(f"exchange.collected.{rank}", timeout_s=120.0, required=n_ranks > 1)


def of_part(event: Event, part: str | None) -> Event:
    """Return the event by which a named part exchanges what this one exchanges without a name."""
    return event if part is None else replace(event, name=f"{event.name}.{part}")


def curriculum_event(name: str) -> Event:
    """Return the event by which the learner sends the values of a curriculum to the others."""
    return Event(f"exchange.curriculum.{name}", delivery="latest")


@dataclass(frozen=True, slots=True)
class ExchangeEvent:
    """A row of the table of events.

    Attributes:
        event: its name and its delivery contract.
        sender: the role that sends it.
        receiver: the role that receives it.
        payload: the arguments of its handlers, by name.
        when: when it is sent.
        answer: the event that acknowledges it once it has been taken; None: the router's own
            acknowledgment is enough.
    """

    event: Event
    sender: str
    receiver: str
    payload: Mapping[str, Any]
    when: str
    answer: Event | None = None

    @property
    def acknowledged(self) -> str:
        """When it counts as delivered."""
        if self.event.delivery != "reliable":
            return "no"
        if self.answer is not None:
            return f"when it is taken, by `{self.answer.name}`"
        return f"when it is {self.event.acknowledged}"

    @property
    def unheard(self) -> str:
        """What happens to it when nobody has subscribed to it."""
        if self.receiver == "itself":
            return "nothing"
        if self.event.delivery == "latest":
            return "kept for nodes that subscribe later"
        if self.event.required:
            return "`NoSubscriber` is raised"
        return "counted as unsubscribed"


EVENTS: Final = (
    ExchangeEvent(
        collected_event("0", n_ranks=1),
        "collector",
        "learner",
        {"batch": Batch},
        "after a step that has collected; at most `max_ahead` are not taken yet",
        answer=CONSUMED,
    ),
    ExchangeEvent(
        collected_event("<rank>", n_ranks=2),
        "collector",
        "one of several learners",
        {"batch": Batch},
        "the same",
        answer=CONSUMED,
    ),
    ExchangeEvent(
        CONSUMED,
        "each learner",
        "the batch's sender",
        {"token": str, "number": int, "counters": Counters},
        "when it has taken a batch",
    ),
    ExchangeEvent(
        EVALUATED,
        "evaluator",
        "learner",
        {"evaluation": Evaluation},
        "after a step that has evaluated",
    ),
    ExchangeEvent(
        UPDATES_WANTED,
        "a node that does not collect",
        "learner",
        {"node_id": int, "train_iter": int},
        "before it waits for further updates, unless they arrive with the weights",
    ),
    ExchangeEvent(
        LEARNED,
        "learner",
        "all others, or those that want updates",
        {"counters": Counters},
        "at its start, when a node joins, as often as `max_policy_lag` needs it, and as an answer",
    ),
    ExchangeEvent(
        MODEL,
        "learner",
        "all others",
        {"counters": Counters, "state": dict},
        "at its start, and every `every_train_iter` updates",
    ),
    ExchangeEvent(
        UPDATED,
        "a node that loads weights",
        "itself",
        {"counters": Counters},
        "when weights have arrived",
    ),
    ExchangeEvent(
        curriculum_event("<name>"),
        "learner",
        "all others",
        {"values": dict},
        "at its start, and when its rule has changed a value",
    ),
    ExchangeEvent(
        REACHED,
        "a node at a barrier",
        "its peers, which pass it on",
        {"name": str, "sender": int, "node_id": int, "token": str, "number": int, "n_times": int,
         "peers": tuple},
        "at a barrier, and when its connections change",
    ),
    ExchangeEvent(
        WAITS,
        "a node that waits",
        "all others",
        {"node_id": int, "awaited": list},
        "every 2 s of a wait, with the nodes that it waits for",
    ),
)  # fmt: skip
"""All events of the exchange, of barriers and of curricula. Of several learners, rank 0 sends and
receives them, unless another one is named."""


def events_table(events: Iterable[ExchangeEvent] = EVENTS) -> str:
    """Return the events as a table in Markdown."""
    heads = (
        "event",
        "from → to",
        "payload",
        "sent",
        "delivery",
        "acknowledged",
        "if nobody listens",
    )
    rows = [heads, ("---",) * len(heads)]
    for message in events:
        payload = ", ".join(f"{name}: {_type_name(kind)}" for name, kind in message.payload.items())
        rows.append(
            (
                f"`{message.event.name}`",
                f"{message.sender} → {message.receiver}",
                f"`{payload}`",
                message.when,
                message.event.delivery,
                message.acknowledged,
                message.unheard,
            )
        )
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _type_name(kind: Any) -> str:
    return "Counters" if kind is Counters else str(kind.__name__)


def merge_counters(known: Counters | None, new: Counters) -> Counters:
    """Return the newest counters; those of an earlier learner are ignored."""
    if known is None or new["epoch"] > known["epoch"]:
        return new
    if new["epoch"] < known["epoch"]:
        return known
    # They arrive over several streams, so older ones may arrive later.
    return {name: max(value, new[name]) for name, value in known.items()}
