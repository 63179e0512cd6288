"""Two nodes with several connections at once end with one of them, and nobody seems to leave."""

from __future__ import annotations

import random

import pytest

from dmiddleware.errors import HandshakeRefused
from dmiddleware.router.protocol.node import NodeProtocol
from dmiddleware.router.wire.frame import FrameType, type_of
from tests.dmiddleware.router.node_pairs import (
    Connection,
    emit,
    exchange,
    join,
    kinds,
    make_node,
    taken,
)


class Choices:
    """Makes choices so that each sequence of them is made once."""

    def __init__(self) -> None:
        self._taken: list[tuple[int, int]] = []
        self._at = 0

    def choose(self, n: int) -> int:
        if self._at == len(self._taken):
            self._taken.append((0, n))
        self._at += 1
        return self._taken[self._at - 1][0]

    def restart(self) -> bool:
        """Return whether there is another sequence, and begin it."""
        self._at = 0
        while self._taken and self._taken[-1][0] + 1 == self._taken[-1][1]:
            self._taken.pop()
        if self._taken:
            chosen, n = self._taken[-1]
            self._taken[-1] = chosen + 1, n
        return bool(self._taken)


def check_one_connection(connections: list[Connection], nodes: list[NodeProtocol]) -> None:
    (stays,) = (one for one in connections if one.is_open)
    for one in connections:
        if one is not stays:
            assert one.has_ended == [True, True]
        for error in one.errors:
            assert isinstance(error, HandshakeRefused) and error.code == "connected", error
    assert kinds(nodes) == [["joined"], ["joined"]]
    for number in range(3):
        assert emit(nodes[0], "2", "up", number) and emit(nodes[1], "1", "down", number)
    exchange(stays)
    assert taken(nodes[1]) == [("1", "up", number) for number in range(3)]
    assert taken(nodes[0]) == [("2", "down", number) for number in range(3)]


def steps_of(connections: list[Connection]) -> list[tuple[Connection, int]]:
    return [(one, side) for one in connections for side in (0, 1) if one.can_deliver(side)]


def greets(connection: Connection, side: int) -> bool:
    """Whether a frame of a handshake, or the end, can arrive, after frames of the session."""
    frames = connection.routes[side].frames
    if connection.routes[side].is_closed:
        return connection.can_deliver(side)
    return bool(frames) and type_of(frames[0]) < FrameType.DATA


@pytest.mark.parametrize("dialers", [(0, 1), (0, 0), (1, 1)])
def test_in_every_order_of_two_handshakes_one_connection_stays(dialers: tuple[int, int]) -> None:
    choices = Choices()
    n_orders = 0
    while not n_orders or choices.restart():
        n_orders += 1
        nodes = [make_node("1"), make_node("2")]
        connections = [Connection(nodes[one], nodes[1 - one]) for one in dialers]
        while steps := steps_of(connections):
            # The order of the frames of a session changes nothing.
            steps = [step for step in steps if greets(*step)] or steps[:1]
            connection, side = steps[choices.choose(len(steps))]
            while connection.routes[side].is_closed and connection.routes[side].frames:
                connection.deliver(side)
            connection.deliver(side)
        check_one_connection(connections, nodes)
    assert n_orders > 60


def test_many_dials_in_both_directions_end_with_one_connection() -> None:
    for seed in range(200):
        chance = random.Random(seed)
        nodes = [make_node("1"), make_node("2")]
        connections: list[Connection] = []
        n_dials = chance.randrange(2, 8)
        while (steps := steps_of(connections)) or len(connections) < n_dials:
            if len(connections) < n_dials and (not steps or chance.random() < 0.1):
                dialer = chance.randrange(2)
                connections.append(Connection(nodes[dialer], nodes[1 - dialer], chance=chance))
            else:
                connection, side = chance.choice(steps)
                connection.deliver(side)
        check_one_connection(connections, nodes)


@pytest.mark.parametrize("dialer", [0, 1])
def test_a_peer_with_two_names_is_one_peer_and_never_leaves(dialer: int) -> None:
    nodes = [make_node("1"), make_node("2")]
    here, there = nodes[dialer], nodes[1 - dialer]
    stays = join(here, there)
    for now in range(20):
        with pytest.raises(HandshakeRefused, match="already connected") as refused:
            join(here, there, float(now))
        assert refused.value.code == "connected"
        exchange(stays)
    check_one_connection([stays], nodes)


def test_a_peer_whose_replaced_connection_ends_has_left_if_the_new_one_fails_too() -> None:
    lower, higher = make_node("1"), make_node("2")
    first = join(higher, lower)
    second = Connection(lower, higher)
    for side in (0, 1, 0):
        second.deliver(side)
    assert first.routes[0].is_closed, "the listener of the second one has replaced it"
    first.end(1)
    assert kinds([lower]) == [["joined"]]
    second.cut(1.0)
    assert kinds([lower, higher]) == [["joined", "left"]] * 2


def test_the_next_attempt_follows_one_that_was_never_answered() -> None:
    dialer, listener = make_node("1"), make_node("2")
    first = Connection(dialer, listener)
    for side in (0, 1):
        first.deliver(side)
    with pytest.raises(HandshakeRefused, match="over another connection"):
        join(dialer, listener)
    first.cut()
    exchange(join(dialer, listener))
    assert dialer.is_connected("2") and listener.is_connected("1")


def test_a_dialer_whose_connection_broke_is_let_in_before_the_listener_notices() -> None:
    dialer, listener = make_node("1"), make_node("2")
    first = join(dialer, listener)
    exchange(first)
    first.end(0)
    assert kinds([dialer, listener]) == [["joined", "left"], ["joined"]]
    second = join(dialer, listener)
    assert first.routes[1].is_closed
    first.end(1)
    emit(listener, "1", "e", 1)
    exchange(second)
    assert taken(dialer) == [("2", "e", 1)]
    assert kinds([listener]) == [["joined"]], "it has not been away"
