"""Links within one process."""

from __future__ import annotations

import threading

import pytest

from dmiddleware.errors import DeliveryTimeout
from dmiddleware.worker.comm.memory_link import MemoryNetwork
from dmiddleware.worker.coordinator.messages import Joined, Left, ResourceQuery, TaskClose
from dmiddleware.worker.errors import CoordinatorError


def test_peers_learn_of_each_other_whoever_comes_first():
    network = MemoryNetwork()
    a, b = network.connect("a", "coordinator"), network.connect("b", "learner")
    assert a.receive(0) == ("b", Joined("learner"))
    assert b.receive(0) == ("a", Joined("coordinator"))
    assert a.peers() == {"b": "learner"}
    assert (a.uid, b.uid) == ("a", "b")


def test_messages_arrive_in_order():
    network = MemoryNetwork()
    a, b = network.connect("a", "coordinator"), network.connect("b", "learner")
    b.receive(0)
    a.send("b", ResourceQuery())
    a.send("b", TaskClose("t", 1))
    assert [b.receive(0), b.receive(0)] == [("a", ResourceQuery()), ("a", TaskClose("t", 1))]
    assert b.receive(0) is None


def test_a_closed_link_is_reported_and_gets_nothing():
    network = MemoryNetwork()
    a, b = network.connect("a", "coordinator"), network.connect("b", "learner")
    a.receive(0)
    b.close(1.0)
    b.close(1.0)
    assert a.receive(0) == ("b", Left("closed"))
    assert b.receive(60.0) is None
    with pytest.raises(DeliveryTimeout, match="not connected"):
        a.send("b", ResourceQuery())


def test_a_receiver_wakes_up_when_a_message_arrives():
    network = MemoryNetwork()
    a = network.connect("a", "coordinator")
    received = []
    thread = threading.Thread(target=lambda: received.append(a.receive(60.0)), daemon=True)
    thread.start()
    network.connect("b", "learner")
    thread.join(60.0)
    assert received == [("b", Joined("learner"))]


def test_an_idle_receiver_lets_the_others_work():
    waited = []
    network = MemoryNetwork(idle=waited.append)
    a = network.connect("a", "coordinator")
    assert a.receive(0.5) is None
    assert waited == [0.5]


def test_two_peers_cannot_have_one_name():
    network = MemoryNetwork()
    network.connect("a", "coordinator")
    with pytest.raises(CoordinatorError, match="already connected"):
        network.connect("a", "learner")
