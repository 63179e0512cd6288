"""Names of events of several tasks."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dmiddleware.event_names import base_name, scoped_name, task_number

NAMES = st.text("abc.() 0123", min_size=1).filter(lambda name: " (task " not in name)


@given(name=NAMES, number=st.integers(1, 10**6))
def test_a_scoped_name_has_its_parts(name: str, number: int) -> None:
    scoped = scoped_name(name, number)
    assert base_name(scoped) == name
    assert task_number(scoped) == number


@given(name=NAMES, one=st.integers(1, 1000), other=st.integers(1, 1000))
def test_names_of_different_tasks_differ(name: str, one: int, other: int) -> None:
    assert (scoped_name(name, one) == scoped_name(name, other)) == (one == other)


def test_the_first_task_uses_the_names_as_they_are() -> None:
    assert scoped_name("exchange.model", 1) == "exchange.model"
