from __future__ import annotations

from dmiddleware.classic.logs import table


def test_values_are_printed_below_their_names():
    assert table({"loss": 0.25, "lr": 1e-4}) == "loss      lr\n0.25  0.0001"


def test_long_tables_wrap_after_six_columns():
    lines = table({f"n{i}": i for i in range(8)}).splitlines()
    assert lines == [
        "n0  n1  n2  n3  n4  n5",
        " 0   1   2   3   4   5",
        "n6  n7",
        " 6   7",
    ]


def test_an_empty_table_is_empty():
    assert table({}) == ""
