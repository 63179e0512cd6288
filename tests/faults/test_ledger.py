"""Ledgers, and their comparison."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.ledger import Comparison, Ledger, Writer, compare, compare_killed, join


def whole(*numbers: int) -> list[tuple[int, bool]]:
    return [(number, True) for number in numbers]


def test_messages_that_arrive_once_and_in_order_are_clean() -> None:
    assert compare(3, whole(0, 1, 2)).clean


@pytest.mark.parametrize(
    ("got", "fault"),
    [
        (whole(0, 2), "lost"),
        (whole(0, 1, 1, 2), "duplicated"),
        (whole(0, 2, 1), "reordered"),
        ([*whole(0, 1), (2, False)], "damaged"),
        (whole(0, 1, 2, 3), "invented"),
    ],
)
def test_each_kind_of_fault_is_distinguished(got: list[tuple[int, bool]], fault: str) -> None:
    verdict = compare(3, got)
    assert not verdict.clean
    faults = ("lost", "duplicated", "reordered", "damaged", "invented")
    assert [name for name in faults if getattr(verdict, name)] == [fault]


def test_a_sender_that_accepted_nothing_is_not_clean() -> None:
    assert not compare(0, []).clean


def test_acknowledged_messages_of_a_killed_sender_must_have_arrived() -> None:
    sent = [["sent", 0.0, "e", 0, 1], ["sent", 0.0, "e", 1, 1], ["sent", 0.0, "e", 2, 1]]
    assert compare_killed(sent, whole(0, 1)).clean
    assert compare_killed(sent, whole(0)).lost == 1
    assert compare_killed(sent, whole(0, 1, 2, 3)).clean, "it died between emit and its ledger"
    assert compare_killed(sent, whole(0, 1, 3)).lost == 1
    assert compare_killed(sent, whole(0, 1, 2, 3, 4)).invented == 1


def test_comparisons_add_up() -> None:
    total = join([compare(2, whole(0)), compare(1, whole(0, 0))])
    assert total == Comparison(accepted=3, arrived=2, lost=1, duplicated=1)


def test_a_ledger_can_be_read_while_it_grows(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    ledger = Ledger(path)
    assert ledger.lines() == []
    with Writer(path) as write:
        write("sent", "e", 0, 1)
    with path.open("ab") as file:
        file.write(b'["got", 1.0, "e", 7')
    assert [line[0] for line in ledger.lines()] == ["sent"]
    assert ledger.sent() == 1
    with path.open("ab") as file:
        file.write(b", 99, 5, true]\n")
    assert ledger.got(7, 99) == [(5, True)]
    assert ledger.lines("sent", since=2.0**40) == []
