"""Two processes of which one, or both, have no memory of the other."""

from __future__ import annotations

import random
from typing import Any

import pytest

from dmiddleware.router.protocol.node import NodeProtocol
from dmiddleware.router.protocol.options import NodeOptions
from dmiddleware.router.wire.envelope import encode_event
from tests.dmiddleware.router.node_pairs import (
    CODEC,
    Connection,
    beat,
    emit,
    exchange,
    join,
    kinds,
    make_node,
    taken,
)

OPTIONS = NodeOptions(max_peers=1, fragment_bytes=100)


def forget(node: NodeProtocol, now: float) -> None:
    """Let a node with room for one peer forget the one that it has, in favor of another."""
    assert node.tick(now) != []
    join(make_node("9"), node, now).cut(now)
    node.tick(now + 200.0)
    (name,) = node.peers
    assert name == "9"


def connected() -> Connection:
    """Return a connection over which events of all kinds have gone, both ways."""
    nodes = make_node("1", options=OPTIONS), make_node("0", options=OPTIONS)
    for node in nodes:
        node.subscriptions.subscribe(["e", "large", "weights"])
        node.subscriptions.announce_ready()
    connection = join(*nodes)
    exchange(connection)
    send_all(connection, 0)
    check_all(connection, 0)
    return connection


def send_all(connection: Connection, number: int) -> None:
    for node, other in zip(connection.nodes, connection.nodes[::-1], strict=True):
        to = other.identity.node_id
        for is_handled in (False, True):
            assert emit(node, to, "e", number, handled=is_handled)
            assert emit(node, to, "large", (number, bytes(1000)), handled=is_handled)
        node.subscriptions.put_latest(encode_event("weights", number, CODEC))
        node.peers[to].outgoing.put_lossy(encode_event("e", number, CODEC))


def check_all(connection: Connection, number: int) -> None:
    """Check that all events arrive, and everything is acknowledged."""
    events: tuple[list[Any], list[Any]] = ([], [])
    for _ in range(4):
        exchange(connection, 400.0)
        for side, node in enumerate(connection.nodes):
            events[side].extend((name, v) for _, name, v in taken(node))
    beat(connection, 400.0)
    for side in (0, 1):
        assert connection.peer(side).outgoing.is_empty
        assert events[side].count(("e", number)) == 3
        assert events[side].count(("large", (number, bytes(1000)))) == 2
        versions = [one for one in events[side] if one[0] == "weights"]
        assert versions[-1] == ("weights", number) and versions == sorted(versions)
        assert len(events[side]) == 5 + len(versions)
    assert not connection.errors and connection.is_open


@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("other_dials", [False, True])
def test_a_process_that_was_removed_comes_back_and_both_start_over(
    side: int, both: bool, other_dials: bool
) -> None:
    connection = connected()
    connection.cut(1.0)
    for node in connection.nodes:
        node.tick(2.0)
    for one in (0, 1) if both else (side,):
        forget(connection.nodes[one], 130.0)
        connection.nodes[one].tick(399.0)
    dialer, listener = connection.nodes[::-1] if other_dials else connection.nodes
    for number in (1, 2, 3):
        connection = join(dialer, listener, 400.0)
        send_all(connection, number)
        check_all(connection, number)
        for node, name in zip(connection.nodes, connection.nodes[::-1], strict=True):
            subscribers = node.subscriptions.subscribers("e")
            assert subscribers == (name.identity.node_id,)
        connection.cut(400.0)


def test_what_was_not_acknowledged_reaches_a_process_that_has_forgotten_its_sender() -> None:
    connection = connected()
    dialer, listener = connection.nodes
    for number in range(5):
        emit(dialer, "0", "e", number)
    connection.fill(0)
    connection.cut(1.0)
    listener.tick(2.0)
    forget(listener, 130.0)
    listener.tick(399.0)
    exchange(join(dialer, listener, 400.0), 400.0)
    assert [v for _, name, v in taken(listener) if name == "e"] == [0, 1, 2, 3, 4]
    assert kinds([dialer])[0] == ["joined", "left", "rejoined"]


def test_frames_whose_events_were_dropped_are_acknowledged_once_the_process_comes_back() -> None:
    dialer, listener = make_node("1"), make_node("0")
    connection = join(dialer, listener)
    exchange(connection)
    for number in range(5):
        emit(dialer, "0", "e", number)
    connection.fill(0)
    connection.cut(1.0)
    assert dialer.tick(2.0) == [] and dialer.tick(300.0) == [("0", 5)]
    connection = join(dialer, listener, 301.0)
    exchange(connection, 301.0)
    beat(connection, 301.0)
    assert taken(listener) == [] and dialer.peers["0"].outgoing.is_empty
    emit(dialer, "0", "e", "later")
    exchange(connection, 301.0)
    assert taken(listener) == [("1", "e", "later")]


def test_in_every_order_of_frames_and_breaks_both_start_over_once() -> None:
    for seed in range(150):
        chance = random.Random(seed)
        connection = connected()
        dialer, listener = connection.nodes
        connection.cut(1.0)
        listener.tick(2.0)
        forget(listener, 130.0)
        listener.tick(399.0)
        for number in range(5):
            emit(dialer, "0", "e", number)
        for _ in range(chance.randrange(4)):
            ends = chance.sample((dialer, listener), 2)
            connection = Connection(*ends, chance=chance)
            for _ in range(chance.randrange(25)):
                sides = [side for side in (0, 1) if connection.can_deliver(side)]
                if sides:
                    connection.deliver(chance.choice(sides), 400.0)
                if connection.is_open and chance.random() < 0.3:
                    chance.choice(ends).beat()
                    connection.fill(chance.randrange(2))
            assert not connection.errors
            connection.cut(400.0)
        exchange(join(dialer, listener, 400.0), 400.0)
        assert [v for _, name, v in taken(listener) if name == "e"] == [0, 1, 2, 3, 4]
