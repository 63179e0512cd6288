"""Values in files and on command lines: numbers and None as Python has them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from dmiddleware.yaml_text import read_yaml, yaml_text


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 0.001),
        ("-2.5E+4", -25000.0),
        ("+.5", 0.5),
        ("1.", 1.0),
        ("1_000", 1000),
        ("-007", -7),
        ("0x1F", 31),
        ("-.INF", -math.inf),
        ("inf", math.inf),
        ("None", None),
        ("~", None),
        ("", None),
        ("true", True),
        ("[1e-3, {a: [None, 1e6]}]", [0.001, {"a": [None, 1_000_000.0]}]),
        ("!!float 1", 1.0),
    ],
)
def test_numbers_and_none_are_read(text: str, value: Any) -> None:
    assert read_yaml(text) == value
    assert type(read_yaml(text)) is type(value)


@pytest.mark.parametrize(
    "text", ["12:30", "2026-11-28", "1e", "e5", "1e-3x", "1.5.2", "1__0", "none", "infinite", "Nan"]
)
def test_what_python_takes_for_no_number_is_text(text: str) -> None:
    assert read_yaml(text) == text


@pytest.mark.parametrize("text", ["'1e-3'", '"None"', "'1'", '"~"'])
def test_quotes_keep_text(text: str) -> None:
    assert read_yaml(text) == text[1:-1]


LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(max_size=8)
    | st.text("0123456789+-.:eE_xinfaNo~", max_size=6)
)
VALUES = st.recursive(
    LEAVES,
    lambda each: (
        st.lists(each, max_size=3) | st.dictionaries(st.text(max_size=4), each, max_size=3)
    ),
    max_leaves=6,
)


@given(VALUES)
@example({"\x85": "\u2028 \u2029"})
def test_what_is_written_is_read_again_also_by_other_readers(value: Any) -> None:
    for text in (yaml_text(value), yaml_text(value, default_flow_style=True)):
        assert repr(read_yaml(text)) == repr(value)
        assert repr(yaml.safe_load(text)) == repr(value)
