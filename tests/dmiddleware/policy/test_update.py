"""What a learn mode's forward returns."""

from __future__ import annotations

import pytest
import torch

from dmiddleware.errors import PolicyOutputError
from dmiddleware.policy import is_update, priorities_of_rows, update_outputs


def test_one_output_and_a_list_of_outputs_are_both_a_list() -> None:
    assert update_outputs({"total_loss": 1.0}) == [{"total_loss": 1.0}]
    assert update_outputs([{}, {"a": 1}]) == [{}, {"a": 1}]


@pytest.mark.parametrize("answer", [None, 1.5, [None], torch.zeros(2)])
def test_anything_but_dictionaries_is_rejected(answer: object) -> None:
    with pytest.raises(PolicyOutputError, match="from update"):
        update_outputs(answer)


def test_an_output_with_kl_stop_is_not_an_update() -> None:
    assert is_update({"total_loss": 1.0})
    assert is_update({"kl_stop": False})
    assert not is_update({"kl_stop": True})


def test_priorities_of_all_rows_stay_as_they_are() -> None:
    priority = torch.ones(4)
    assert priorities_of_rows([{"priority": priority}], 4) == (None, priority)
    assert priorities_of_rows([{}, {"priority": None}], 4) is None


def test_priorities_of_parts_follow_the_order_of_the_batch() -> None:
    outputs = [{"priority": torch.tensor([1.0, 2.0])}, {}, {"priority": torch.tensor([3.0])}]
    found = priorities_of_rows(outputs, 3)
    assert found is not None
    rows, priority = found
    assert rows is not None
    assert rows.tolist() == [0, 1, 2]
    assert priority.tolist() == [1.0, 2.0, 3.0]


def test_the_last_priority_of_a_row_counts() -> None:
    outputs = [
        {"priority": torch.tensor([1.0, 2.0, 3.0])},
        {"priority": [9.0, 8.0], "priority_index": [2, 0]},
        {"priority": torch.tensor([7.0]), "priority_index": torch.tensor([2])},
    ]
    found = priorities_of_rows(outputs, 3)
    assert found is not None
    rows, priority = found
    assert rows is not None
    assert dict(zip(rows.tolist(), priority.tolist(), strict=True)) == {0: 8.0, 1: 2.0, 2: 7.0}


@pytest.mark.parametrize(
    ("output", "word"),
    [
        ({"priority": torch.ones(3)}, "3 priorities for a batch of 4 rows"),
        ({"priority": torch.ones(5)}, "5 priorities"),
        ({"priority": torch.ones(2), "priority_index": [0]}, "priority_index"),
        ({"priority": torch.ones(2), "priority_index": [0, 4]}, "priority_index"),
        ({"priority": torch.ones(2), "priority_index": [0, -1]}, "priority_index"),
    ],
)
def test_priorities_that_fit_no_rows_are_rejected(output: dict[str, object], word: str) -> None:
    with pytest.raises(PolicyOutputError, match=word):
        priorities_of_rows([output], 4)
