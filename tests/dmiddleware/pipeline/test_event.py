"""The queue of the event bus against a naive model of the delivery contracts."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from dmiddleware import Event
from dmiddleware.errors import EventError
from dmiddleware.pipeline.event import Emission, EventCounters, EventQueue, QueuedEvent

EVENTS = (
    Event("commands", capacity=3),
    Event("more commands", capacity=1),
    Event("weights", delivery="latest"),
    Event("metrics", delivery="lossy", capacity=2),
)


@dataclass
class Model:
    """A list of pairs (name of the event, value), and plain counts."""

    queue: list = field(default_factory=list)
    counts: dict = field(default_factory=dict)

    def offer(self, event, value, reserve):
        counts = self.counts.setdefault(event.name, EventCounters())
        waiting = [index for index, (name, _) in enumerate(self.queue) if name == event.name]
        if event.delivery == "latest" and waiting:
            self.queue[waiting[0]] = (event.name, value)
            counts.replaced += 1
        elif event.delivery == "latest" or len(waiting) < event.capacity * (1 + reserve):
            self.queue.append((event.name, value))
        elif event.delivery == "lossy":
            counts.dropped += 1
        else:
            return False
        counts.emitted += 1
        return True


class QueueMachine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.queue, self.model, self.next_value = EventQueue(), Model(), 0

    @rule(event=st.sampled_from(EVENTS), reserve=st.booleans())
    def offer(self, event, reserve):
        self.next_value += 1
        item = QueuedEvent(event, Emission((self.next_value,), {}))
        accepted = self.queue.offer(item, reserve=reserve)
        assert accepted == self.model.offer(event, self.next_value, reserve)

    @rule()
    def take(self):
        item = self.queue.take()
        if not self.model.queue:
            assert item is None
        else:
            assert (item.event.name, *item.emission.args) == self.model.queue.pop(0)

    @invariant()
    def counts_agree(self):
        assert len(self.queue.items) == len(self.model.queue)
        names = [name for name, _ in self.model.queue]
        assert self.queue.waiting() == {name: names.count(name) for name in set(names)}
        for name, counts in self.model.counts.items():
            own = self.queue.counters[name]
            assert (own.emitted, own.dropped, own.replaced) == (
                counts.emitted,
                counts.dropped,
                counts.replaced,
            )


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"acknowledged": "seen"}, "acknowledged"),
        ({"acknowledged": "handled", "delivery": "latest"}, "reliable"),
        ({"required": True, "delivery": "lossy"}, "reliable"),
    ],
)
def test_contracts_that_contradict_themselves_are_refused(options, match):
    with pytest.raises(EventError, match=match):
        Event("a", **options)


TestEventQueue = QueueMachine.TestCase
TestEventQueue.settings = settings(max_examples=50, stateful_step_count=20, deadline=None)
